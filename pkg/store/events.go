package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"iter"
	"time"
)

// Event is one thing that happened to a session. Seq starts at 1 and has no gaps.
type Event struct {
	Session string          `json:"session"`
	Seq     int64           `json:"seq"`
	At      time.Time       `json:"at"`
	Kind    string          `json:"kind"`
	Data    json.RawMessage `json:"data"`
}

// maxEvent bounds one event's data; bulk output goes to files, not here.
const maxEvent = 64 << 10

// followEvery is how often Follow looks for new events; one indexed read.
const followEvery = 50 * time.Millisecond

func appendEvent(ctx context.Context, tx *sql.Tx, id string, ev Event) error {
	if len(ev.Data) == 0 {
		ev.Data = json.RawMessage("{}")
	}
	if len(ev.Data) > maxEvent {
		return fmt.Errorf("event %s of session %s has %d bytes, over the limit of %d", ev.Kind, id, len(ev.Data), maxEvent)
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO events (session, seq, at, kind, data)
		VALUES (?1, (SELECT coalesce(max(seq), 0) + 1 FROM events WHERE session = ?1), ?2, ?3, ?4)`,
		id, time.Now().UnixMilli(), ev.Kind, string(ev.Data))
	if err != nil {
		return fmt.Errorf("append event %s of session %s: %w", ev.Kind, id, err)
	}
	return nil
}

// Append adds an event that changes nothing in the row.
func (s *Store) Append(ctx context.Context, id string, ev Event) error {
	return s.tx(ctx, func(tx *sql.Tx) error { return appendEvent(ctx, tx, id, ev) })
}

// Events returns up to limit events with a sequence over after, in order.
func (s *Store) Events(ctx context.Context, id string, after int64, limit int) ([]Event, error) {
	evs, err := s.events(ctx, id, after, limit)
	return evs, s.explain(ctx, err)
}

func (s *Store) events(ctx context.Context, id string, after int64, limit int) ([]Event, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT session, seq, at, kind, data FROM events WHERE session = ? AND seq > ? ORDER BY seq LIMIT ?`, id, after, limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []Event
	for rows.Next() {
		var ev Event
		var at int64
		var data string
		if err := rows.Scan(&ev.Session, &ev.Seq, &at, &ev.Kind, &data); err != nil {
			return nil, err
		}
		ev.At, ev.Data = time.UnixMilli(at).UTC(), json.RawMessage(data)
		out = append(out, ev)
	}
	return out, rows.Err()
}

// Follow yields every event over after, then waits for new ones until ctx ends.
// An error is yielded once, last.
func (s *Store) Follow(ctx context.Context, id string, after int64) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		tick := time.NewTicker(followEvery)
		defer tick.Stop()
		for {
			evs, err := s.Events(ctx, id, after, 256)
			if err != nil {
				yield(Event{}, err)
				return
			}
			for _, ev := range evs {
				if !yield(ev, nil) {
					return
				}
				after = ev.Seq
			}
			if len(evs) > 0 {
				continue
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				yield(Event{}, ctx.Err())
				return
			}
		}
	}
}

// PruneEvents removes the events of sessions that have been gone since a moment,
// and returns how many and how large they were. Their rows stay: names are never
// used twice. A dry run only counts.
func (s *Store) PruneEvents(ctx context.Context, before time.Time, dry bool) (events int, bytes int64, err error) {
	const old = ` FROM events WHERE session IN (SELECT id FROM sessions WHERE phase = 'gone' AND state_changed_at < ?)`
	err = s.tx(ctx, func(tx *sql.Tx) error {
		row := tx.QueryRowContext(ctx, `SELECT count(*), coalesce(sum(length(data)), 0)`+old, before.UnixMilli())
		if err := row.Scan(&events, &bytes); err != nil || dry || events == 0 {
			return err
		}
		_, err := tx.ExecContext(ctx, `DELETE`+old, before.UnixMilli())
		return err
	})
	return events, bytes, err
}
