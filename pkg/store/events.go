package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Event is one thing that happened to a session or a task, its subject. Seq starts at
// 1, has no gaps and is never used twice. At may go back, because clocks do.
type Event struct {
	Subject string          `json:"subject"`
	Seq     int64           `json:"seq"`
	At      time.Time       `json:"at"`
	Kind    string          `json:"kind"`
	Data    json.RawMessage `json:"data"`
}

// maxEvent limits the size of one event's data; bulk output goes to files instead.
const maxEvent = 64 << 10

// Oldest is the sequence number to read after that starts at the oldest event that
// is kept. In contrast, 0 means the very beginning, and is expired once the first
// event is pruned.
const Oldest int64 = -1

// These are the reasons why events cannot be read after a sequence number. An
// *AnchorError wraps them.
var (
	ErrExpired = errors.New("the next event was removed")
	ErrFuture  = errors.New("the event does not exist yet")
)

// AnchorError reports that events cannot be read after a sequence number, and which
// events can be read.
type AnchorError struct {
	Subject        string
	After          int64
	Oldest, Newest int64 // range of the existing events; 0 and 0 when none exists
	err            error // ErrExpired or ErrFuture
}

func (e *AnchorError) Error() string {
	return fmt.Sprintf("read events of %s after %d, events %d to %d exist: %v", e.Subject, e.After, e.Oldest, e.Newest, e.err)
}

func (e *AnchorError) Unwrap() error { return e.err }

func appendEvents(ctx context.Context, tx *sql.Tx, subject string, evs []Event) error {
	if len(evs) == 0 {
		return nil
	}
	if err := fenced(ctx, tx, subject); err != nil {
		return err
	}
	var seq int64
	if err := tx.QueryRowContext(ctx, `SELECT coalesce(max(seq), 0) FROM events WHERE subject = ?`, subject).Scan(&seq); err != nil {
		return err
	}
	at := now().UnixMilli()
	for _, ev := range evs {
		if len(ev.Data) == 0 {
			ev.Data = json.RawMessage("{}")
		}
		if len(ev.Data) > maxEvent {
			return fmt.Errorf("event %s of %s has %d bytes, over the limit of %d", ev.Kind, subject, len(ev.Data), maxEvent)
		}
		seq++
		if _, err := tx.ExecContext(ctx, `INSERT INTO events (subject, seq, at, kind, data) VALUES (?, ?, ?, ?, ?)`,
			subject, seq, at, ev.Kind, string(ev.Data)); err != nil {
			return fmt.Errorf("append event %s of %s: %w", ev.Kind, subject, err)
		}
	}
	return nil
}

// Append adds an event that changes nothing in the row.
func (s *Store) Append(ctx context.Context, subject string, ev Event) error {
	return s.AppendAll(ctx, subject, []Event{ev})
}

// AppendAll adds events in their order, either all of them or none.
func (s *Store) AppendAll(ctx context.Context, subject string, evs []Event) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		is, err := subjectExists(ctx, tx, subject)
		if err == nil && !is {
			err = fail.New(fail.NotFound, "no session or task %s", subject)
		}
		if err != nil {
			return err
		}
		return appendEvents(ctx, tx, subject, evs)
	})
}

// EventRange returns the sequence numbers of the oldest and the newest existing
// event, or 0 and 0 when none exists.
func (s *Store) EventRange(ctx context.Context, subject string) (oldest, newest int64, err error) {
	err = s.db.retryBusy(ctx, func() error {
		oldest, newest, err = eventRange(ctx, s.db.sql, subject)
		return err
	})
	return oldest, newest, err
}

func eventRange(ctx context.Context, q queryer, subject string) (oldest, newest int64, err error) {
	// Two lookups at the ends of the index; a single aggregate would read everything
	// between.
	err = q.QueryRowContext(ctx, `SELECT coalesce((SELECT min(seq) FROM events WHERE subject = ?1), 0), min(coalesce((SELECT max(seq) FROM events WHERE subject = ?1), 0), `+shown+`)`,
		subject).Scan(&oldest, &newest)
	return oldest, newest, err
}

// Events returns, in order, up to limit events with a sequence number greater than
// after. No events is not an error. It returns an *AnchorError if the event after
// that number was pruned, or if no event has that number yet.
func (s *Store) Events(ctx context.Context, subject string, after int64, limit int) ([]Event, error) {
	return s.events(ctx, subject, after, limit, -1)
}

// events works like Events, but stops once it has this many bytes of data, unless
// bytes is negative.
func (s *Store) events(ctx context.Context, subject string, after int64, limit, bytes int) (evs []Event, err error) {
	err = s.db.retryBusy(ctx, func() error {
		if evs, err = readEvents(ctx, s.db.sql, subject, after, limit, bytes); err != nil {
			return err
		}
		if after < 0 || len(evs) > 0 && evs[0].Seq == after+1 {
			return nil
		}
		// No event, or not the next one. Events that were added in between appear in
		// the range and are returned by the next call.
		oldest, newest, err := eventRange(ctx, s.db.sql, subject)
		switch {
		case err != nil:
			return err
		case after > newest:
			return &AnchorError{subject, after, oldest, newest, ErrFuture}
		case after < oldest-1:
			return &AnchorError{subject, after, oldest, newest, ErrExpired}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return evs, nil
}

// readEvents returns the events that are shown.
func readEvents(ctx context.Context, q queryer, subject string, after int64, limit, bytes int) ([]Event, error) {
	return scanEvents(ctx, q, `AND seq <= `+shown, subject, after, limit, bytes)
}

// storedEvents works as readEvents does, also for those that are not shown yet.
func storedEvents(ctx context.Context, q queryer, subject string, after int64, limit, bytes int) ([]Event, error) {
	return scanEvents(ctx, q, "", subject, after, limit, bytes)
}

func scanEvents(ctx context.Context, q queryer, which, subject string, after int64, limit, bytes int) ([]Event, error) {
	rows, err := q.QueryContext(ctx, `SELECT subject, seq, at, kind, data FROM events WHERE subject = ?1 AND seq > ?2 `+which+` ORDER BY seq LIMIT ?3`, subject, after, limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var evs []Event
	size := 0
	for (bytes < 0 || size < bytes) && rows.Next() {
		var ev Event
		var at int64
		var data string
		if err := rows.Scan(&ev.Subject, &ev.Seq, &at, &ev.Kind, &data); err != nil {
			return nil, err
		}
		ev.At, ev.Data = moment(at), json.RawMessage(data)
		evs = append(evs, ev)
		size += len(data)
	}
	return evs, rows.Err()
}

// These limits bound what one follower holds in memory.
const (
	followEvents = 128
	followBytes  = 128 << 10
)

// Follow yields every event after the given sequence number, in order and once each.
// Then it waits for new ones until ctx ends. An error is yielded once, as the last
// item; a follower so slow that its next event was pruned gets an *AnchorError. Any
// number of followers may run: they do not wait for each other, and idle ones cost
// nothing.
func (s *Store) Follow(ctx context.Context, subject string, after int64) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		var t *topic
		defer func() { s.notifier.leave(t) }()
		for {
			news, evs, look := s.notifier.news(t, after) // before the read: events that are added after it trigger news
			if look && len(evs) == 0 {
				var err error
				if evs, err = s.events(ctx, subject, after, followEvents, followBytes); err != nil {
					yield(Event{}, err)
					return
				}
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
			if t == nil {
				t = s.notifier.join(s.db.sql, subject)
				continue
			}
			select {
			case <-news:
			case <-ctx.Done():
				yield(Event{}, ctx.Err())
				return
			}
		}
	}
}

// pruneStep is how many events one transaction removes, so that others can write in
// between.
const pruneStep = 1000

// PruneEvents removes the events that happened before the given time. It returns
// their number and size. The remaining events of a subject have no gap, and its
// newest event always stays, so no sequence number is used again. Active subjects are
// left alone. A dry run only counts.
func (s *Store) PruneEvents(ctx context.Context, before time.Time, active func(subject string) bool, dry bool) (events int, bytes int64, err error) {
	// Prune up to the first recent event. An older one may follow it if the clock
	// went back.
	type old struct {
		subject      string
		oldest, keep int64 // sequence numbers: of the first existing event, and of the first that stays
	}
	var all []old
	err = s.db.retryBusy(ctx, func() error {
		all, err = collect(ctx, s.db.sql, func(row scanner) (o old, err error) {
			err = row.Scan(&o.subject, &o.oldest, &o.keep)
			return o, err
		}, `SELECT subject, min(seq) AS oldest, coalesce(min(seq) FILTER (WHERE at >= ?), max(seq)) AS keep FROM events GROUP BY subject HAVING oldest < keep`, before.UnixMilli())
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	for _, o := range all {
		if active(o.subject) {
			continue
		}
		for from := o.oldest; from < o.keep; from += pruneStep {
			n, size, err := s.pruneRange(ctx, o.subject, from, min(from+pruneStep, o.keep), dry)
			if err != nil {
				return events, bytes, err
			}
			events, bytes = events+n, bytes+size
		}
	}
	return events, bytes, nil
}

func (s *Store) pruneRange(ctx context.Context, subject string, from, to int64, dry bool) (events int, bytes int64, err error) {
	const which = ` FROM events WHERE subject = ? AND seq >= ? AND seq < ?`
	count := func(q queryer) error {
		return q.QueryRowContext(ctx, `SELECT count(*), coalesce(sum(octet_length(data)), 0)`+which, subject, from, to).Scan(&events, &bytes)
	}
	if dry {
		err = s.db.retryBusy(ctx, func() error { return count(s.db.sql) })
		return events, bytes, err
	}
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		if err := count(tx); err != nil || events == 0 { // another process pruned meanwhile
			return err
		}
		_, err := tx.ExecContext(ctx, `DELETE`+which, subject, from, to)
		return err
	})
	return events, bytes, err
}
