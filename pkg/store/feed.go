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
	// glanceEvery is how often a process whose followers wait looks whether anybody,
	// itself included, has written. A glance takes some 20 µs.
	glanceEvery = 5 * time.Millisecond
	// calmEvery is how often it does when for calmAfter nobody has.
	calmEvery = 25 * time.Millisecond
	calmAfter = 10 * time.Second
)

// feed wakes the followers in this process. There is one watcher for all of them,
// as long as there is one: a glance at the file tells it whether anything was
// written, and only then it asks whether that were events of those it watches for.
// It reads these once, for all who have read what was before.
type feed struct {
	mu     sync.Mutex
	topics map[string]*topic // by subject
	stop   context.CancelFunc
	done   chan struct{}
}

// topic is a subject that is followed.
type topic struct {
	subject   string
	followers int
	newest    int64         // sequence of which the followers were told; 0 when they have to look
	recent    []Event       // the first of those that they were told of last; may be none
	news      chan struct{} // closed when there may be more
}

// join starts to watch a subject; the caller leaves it in the end. What was
// written before may never be told.
func (f *feed) join(db *sql.DB, subject string) *topic {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.topics) == 0 {
		f.topics = map[string]*topic{}
		var ctx context.Context
		ctx, f.stop = context.WithCancel(context.Background()) // it serves them all, and ends with the last
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

// leave ends what join began; without a topic there is nothing to be left.
func (f *feed) leave(t *topic) {
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

// news is closed when there may be events that were written after this call. look
// says whether there may be any after that sequence now; if evs are there, they are
// the next of them.
func (f *feed) news(t *topic, after int64) (news <-chan struct{}, evs []Event, look bool) {
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

func (f *feed) watch(ctx context.Context, db *sql.DB, done chan<- struct{}) {
	defer close(done)
	g := glancer{db: db}
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
		written, err := g.glance(ctx, f)
		if err != nil {
			g.close()
			f.lost() // each will see by itself what is wrong
		}
		now := time.Now()
		if written {
			wrote = now
		}
		every := glanceEvery
		if now.Sub(wrote) > calmAfter {
			every = calmEvery
		}
		next.Reset(every)
	}
}

// tell wakes the followers of the subjects that have something newer.
func (f *feed) tell(newest map[string]int64, recent map[string][]Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.topics {
		if newest[t.subject] > t.newest {
			t.wake(newest[t.subject], recent[t.subject])
		}
	}
}

// lost wakes all, who have to look for themselves.
func (f *feed) lost() {
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

// told is of which sequence the followers of each subject were told.
func (f *feed) told() map[string]int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make(map[string]int64, len(f.topics))
	for subject, t := range f.topics {
		all[subject] = t.newest
	}
	return all
}

// glancer keeps a connection: what SQLite counts are the commits of all others.
type glancer struct {
	db   *sql.DB
	conn *sql.Conn
	seen int64 // PRAGMA data_version
}

func (g *glancer) close() {
	if g.conn != nil {
		_ = g.conn.Close() // it only read
		g.conn = nil
	}
}

// What the watcher reads of one subject for all its followers at a time.
const (
	recentEvents = 64
	recentBytes  = 64 << 10
)

// glance tells the followers what is new, and reports whether anybody has written.
func (g *glancer) glance(ctx context.Context, f *feed) (written bool, err error) {
	first := g.conn == nil
	if first {
		if g.conn, err = g.db.Conn(ctx); err != nil {
			return false, err
		}
	}
	var version int64
	if err := g.conn.QueryRowContext(ctx, `PRAGMA data_version`).Scan(&version); err != nil {
		return false, err
	}
	if version == g.seen && !first {
		return false, nil
	}
	// A commit between that look and the next is of a later version. One follower
	// more in between has looked after it joined.
	told := f.told()
	newest, err := g.newest(ctx, slices.Collect(maps.Keys(told)))
	if err != nil {
		return false, err
	}
	recent := map[string][]Event{}
	for subject, seq := range newest {
		// Of a subject that is followed anew, everyone has read something else.
		if last := told[subject]; last > 0 && last < seq {
			if recent[subject], err = readEvents(ctx, g.conn, subject, last, recentEvents, recentBytes); err != nil {
				return false, err
			}
		}
	}
	g.seen = version
	f.tell(newest, recent)
	return true, nil
}

// newest are the sequences of the subjects' last events, in one query.
func (g *glancer) newest(ctx context.Context, subjects []string) (map[string]int64, error) {
	rows, err := g.conn.QueryContext(ctx, `SELECT value, coalesce((SELECT max(seq) FROM events WHERE subject = value), 0) FROM json_each(?)`, list(subjects))
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
