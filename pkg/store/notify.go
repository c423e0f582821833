package store

import (
	"context"
	"database/sql"
	"maps"
	"slices"
	"sync"
	"time"
)

const (
	// pollEvery is how often a process with waiting followers checks whether any
	// process, including itself, has written. A check takes about 10 µs.
	pollEvery = 5 * time.Millisecond
	// idlePollEvery is the interval after idleAfter without a write. The heartbeats of a
	// host in a cluster are writes, too.
	idlePollEvery = 25 * time.Millisecond
	idleAfter     = time.Second
)

// notifier wakes the followers in this process. One watcher serves them all, and runs
// while any follower exists. It checks cheaply whether the file changed; only then
// does it query whether followed subjects have new events. It reads these once, for
// all followers that have read the earlier ones.
type notifier struct {
	mu     sync.Mutex
	topics map[string]*topic // by subject
	stop   context.CancelFunc
	done   chan struct{}
}

// topic is a subject with followers.
type topic struct {
	subject   string
	followers int
	newest    int64         // the newest sequence number announced to the followers; 0 when they have to read the store
	recent    []Event       // the first of the events announced last; may be empty
	news      chan struct{} // closed when there may be more
}

// join starts to watch a subject; the caller must call leave. Events that were
// written before may never be announced.
func (f *notifier) join(db *sql.DB, subject string) *topic {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.topics) == 0 {
		f.topics = map[string]*topic{}
		var ctx context.Context
		ctx, f.stop = context.WithCancel(context.Background()) // serves all followers, and ends with the last one
		f.done = make(chan struct{})
		go f.watch(ctx, db, f.done)
	}
	t := f.topics[subject]
	if t == nil {
		t = &topic{subject: subject, news: make(chan struct{})}
		f.topics[subject] = t
	}
	t.followers++
	return t
}

// leave ends what join began; for a nil topic it does nothing.
func (f *notifier) leave(t *topic) {
	if t == nil {
		return
	}
	f.mu.Lock()
	t.followers--
	if t.followers == 0 {
		delete(f.topics, t.subject)
	}
	last, stop, done := len(f.topics) == 0, f.stop, f.done
	f.mu.Unlock()
	if last {
		stop()
		<-done
	}
}

// news returns a channel that is closed when events may have been written after this
// call. look reports whether any events after that sequence number may exist now. If
// evs is not empty, it holds the next of them.
func (f *notifier) news(t *topic, after int64) (news <-chan struct{}, evs []Event, look bool) {
	if t == nil {
		return nil, nil, true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(t.recent); n > 0 && t.recent[0].Seq <= after+1 && after < t.recent[n-1].Seq {
		evs = t.recent[after+1-t.recent[0].Seq:]
	}
	return t.news, evs, t.newest == 0 || t.newest > after
}

func (f *notifier) watch(ctx context.Context, db *sql.DB, done chan<- struct{}) {
	defer close(done)
	g := poller{db: db}
	defer g.close()
	next := time.NewTimer(0)
	defer next.Stop()
	wrote := time.Now()
	for {
		select {
		case <-next.C:
		case <-ctx.Done():
			return
		}
		written, err := g.poll(ctx, f)
		if err != nil {
			g.close()
			f.notifyAll() // each follower finds the error itself
		}
		now := time.Now()
		if written {
			wrote = now
		}
		every := pollEvery
		if now.Sub(wrote) > idleAfter {
			every = idlePollEvery
		}
		next.Reset(every)
	}
}

// notify wakes the followers of the subjects that have newer events.
func (f *notifier) notify(newest map[string]int64, recent map[string][]Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.topics {
		if newest[t.subject] > t.newest || t.subject == anySubject {
			t.wake(newest[t.subject], recent[t.subject])
		}
	}
}

// anySubject is the topic of those who watch all commits.
const anySubject = ""

// Watch is notified of the commits of all processes.
type Watch struct {
	store *Store
	topic *topic
}

// Watch starts to watch. The caller must call Close.
func (s *Store) Watch() *Watch { return &Watch{s, s.notifier.join(s.db.sql, anySubject)} }

// Changed returns a channel that is closed when something may have been written after this
// call.
func (w *Watch) Changed() <-chan struct{} {
	news, _, _ := w.store.notifier.news(w.topic, 0)
	return news
}

// Close ends the watch.
func (w *Watch) Close() { w.store.notifier.leave(w.topic) }

// notifyAll wakes all followers; they have to read the store themselves.
func (f *notifier) notifyAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.topics {
		t.wake(0, nil)
	}
}

func (t *topic) wake(newest int64, recent []Event) {
	t.newest, t.recent = newest, recent
	close(t.news)
	t.news = make(chan struct{})
}

// lastNotified returns, by subject, the sequence number last announced to its followers.
func (f *notifier) lastNotified() map[string]int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make(map[string]int64, len(f.topics))
	for subject, t := range f.topics {
		all[subject] = t.newest
	}
	return all
}

// poller keeps one connection open: SQLite's data_version counts only the commits of
// other connections.
type poller struct {
	db   *sql.DB
	conn *sql.Conn
	seen int64 // PRAGMA data_version
}

func (g *poller) close() {
	if g.conn != nil {
		_ = g.conn.Close() // it only read
		g.conn = nil
	}
}

// These limit what the watcher reads at a time of one subject for all its followers.
const (
	recentEvents = 64
	recentBytes  = 64 << 10
)

// poll announces new events to the followers. It reports whether any process has
// written.
func (g *poller) poll(ctx context.Context, f *notifier) (written bool, err error) {
	first := g.conn == nil
	if first {
		if g.conn, err = g.db.Conn(ctx); err != nil {
			return false, err
		}
	}
	var version int64
	// It does not wait for anything, and without a context that can end it takes half the time.
	if err := g.conn.QueryRowContext(context.WithoutCancel(ctx), `PRAGMA data_version`).Scan(&version); err != nil {
		return false, err
	}
	if version == g.seen && !first {
		return false, nil
	}
	// A commit between this check and the next has a later version. A follower that
	// joins in between has read the store after it joined.
	notified := f.lastNotified()
	newest, err := g.newest(ctx, slices.Collect(maps.Keys(notified)))
	if err != nil {
		return false, err
	}
	recent := map[string][]Event{}
	for subject, seq := range newest {
		// If the subject was not followed before, its followers have not all read the
		// same events.
		if last := notified[subject]; last > 0 && last < seq {
			if recent[subject], err = readEvents(ctx, g.conn, subject, last, recentEvents, recentBytes); err != nil {
				return false, err
			}
		}
	}
	g.seen = version
	f.notify(newest, recent)
	return true, nil
}

// newest returns the sequence numbers of the subjects' last events, with one query.
func (g *poller) newest(ctx context.Context, subjects []string) (map[string]int64, error) {
	rows, err := g.conn.QueryContext(ctx, `SELECT value, min(coalesce((SELECT max(seq) FROM events WHERE subject = value), 0),
		coalesce((SELECT shipped FROM cluster_tasks WHERE task = value), 9223372036854775807)) FROM json_each(?)`, list(subjects))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	newest := make(map[string]int64, len(subjects))
	for rows.Next() {
		var subject string
		var seq int64
		if err := rows.Scan(&subject, &seq); err != nil {
			return nil, err
		}
		newest[subject] = seq
	}
	return newest, rows.Err()
}
