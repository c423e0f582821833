package store

import (
	"context"
	"database/sql"
	"sync"
	"time"
)

// glanceEvery is how often a process whose followers wait looks whether anybody,
// itself included, has written.
const glanceEvery = 25 * time.Millisecond

// feed wakes the followers in this process. There is one watcher for all of them,
// as long as there is one: a glance at the file tells it whether anything was
// written, and only then it asks whether that were events of those it watches for.
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
	newest    int64         // sequence of which the followers were told
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

// news is closed when there may be events that were written after this call.
func (f *feed) news(t *topic) <-chan struct{} {
	if t == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return t.news
}

func (f *feed) watch(ctx context.Context, db *sql.DB, done chan<- struct{}) {
	defer close(done)
	tick := time.NewTicker(glanceEvery)
	defer tick.Stop()
	g := glancer{db: db}
	defer g.close()
	for {
		if err := g.glance(ctx, f); err != nil {
			g.close()
			f.tell(nil) // each will see by itself what is wrong
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// tell wakes the followers of the subjects that have something newer; nil, all.
func (f *feed) tell(newest map[string]int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.topics {
		if newest != nil && newest[t.subject] <= t.newest {
			continue
		}
		t.newest = max(t.newest, newest[t.subject])
		close(t.news)
		t.news = make(chan struct{})
	}
}

func (f *feed) subjects() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make([]string, 0, len(f.topics))
	for subject := range f.topics {
		all = append(all, subject)
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

func (g *glancer) glance(ctx context.Context, f *feed) (err error) {
	first := g.conn == nil
	if first {
		if g.conn, err = g.db.Conn(ctx); err != nil {
			return err
		}
	}
	var version int64
	if err := g.conn.QueryRowContext(ctx, `PRAGMA data_version`).Scan(&version); err != nil {
		return err
	}
	if version == g.seen && !first {
		return nil
	}
	// A commit between that look and the next is of a later version. One follower
	// more in between has looked after it joined.
	newest, err := g.newest(ctx, f.subjects())
	if err != nil {
		return err
	}
	g.seen = version
	f.tell(newest)
	return nil
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
