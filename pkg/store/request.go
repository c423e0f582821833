package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Request is a client's request that may be repeated: after a crash the client cannot
// know whether it was carried out.
type Request struct {
	Actor   string          // who asks; each actor has its own keys
	Key     string          // the client's name for the request
	Digest  string          // of what was asked for
	Subject string          // the id of what was created
	Notes   json.RawMessage // the rest of the answer
}

const (
	requestAge = 24 * time.Hour
	requestMax = 10_000 // per actor
)

// Request returns the request with that key, if it was reserved within the last day.
func (s *Store) Request(ctx context.Context, actor, key string) (r Request, found bool, err error) {
	err = s.db.retryBusy(ctx, func() error {
		r, found, err = request(ctx, s.db.sql, actor, key)
		return err
	})
	return r, found, err
}

func request(ctx context.Context, q queryer, actor, key string) (Request, bool, error) {
	r := Request{Actor: actor, Key: key}
	var notes string
	err := q.QueryRowContext(ctx, `SELECT digest, subject, notes FROM requests WHERE actor = ? AND key = ? AND at >= ?`, actor, key, now().Add(-requestAge).UnixMilli()).
		Scan(&r.Digest, &r.Subject, &notes)
	if errors.Is(err, sql.ErrNoRows) {
		return Request{}, false, nil
	}
	r.Notes = json.RawMessage(notes)
	return r, err == nil, err
}

// Release removes r, which Reserve stored, because what it asked for was not begun.
func (s *Store) Release(ctx context.Context, r Request) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM requests WHERE actor = ? AND key = ? AND subject = ?`, r.Actor, r.Key, r.Subject)
		return err
	})
}

// Reserve stores r, unless its actor already has a request with that key, which is
// then returned instead. Keys expire after a day, and an actor's oldest ones when it
// has too many.
func (s *Store) Reserve(ctx context.Context, r Request) (kept Request, err error) {
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `DELETE FROM requests WHERE at < ?`, now().Add(-requestAge).UnixMilli()); err != nil {
			return fmt.Errorf("remove old requests: %w", err)
		}
		var found bool
		if kept, found, err = request(ctx, tx, r.Actor, r.Key); err != nil || found {
			return err
		}
		kept = r
		if _, err := tx.ExecContext(ctx, `INSERT INTO requests (actor, key, digest, subject, notes, at) VALUES (?, ?, ?, ?, ?, ?)`,
			r.Actor, r.Key, r.Digest, r.Subject, string(r.Notes), now().UnixMilli()); err != nil {
			return fmt.Errorf("store request: %w", err)
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM requests WHERE actor = ?1 AND num <= (SELECT num FROM requests WHERE actor = ?1 ORDER BY num DESC LIMIT 1 OFFSET ?2)`, r.Actor, requestMax)
		return err
	})
	return kept, err
}
