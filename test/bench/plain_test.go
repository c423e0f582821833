//go:build bench

package bench

import (
	"database/sql"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	_ "modernc.org/sqlite"
)

// plain is the baseline for serve: a bare database on the same disk, as durable as
// the store.
type plain struct {
	t  *testing.T
	db *sql.DB
}

func newPlain(t *testing.T) *plain {
	t.Helper()
	dir, err := os.MkdirTemp("", "e") // on the same disk as the farms
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "plain.db")+"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1) // one writer at a time
	if _, err := db.Exec(`CREATE TABLE rows (num INTEGER PRIMARY KEY, text TEXT NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	return &plain{t, db}
}

func (p *plain) close() {
	if err := p.db.Close(); err != nil {
		p.t.Error(err)
	}
}

func (p *plain) one() {
	if _, err := p.db.Exec(`INSERT INTO rows (text) VALUES (?)`, waiting); err != nil {
		p.t.Error(err)
	}
}

// insert inserts n rows from this many writers. Each row has its own transaction,
// which is on disk when it ends. It returns how long each took, in ms.
func (p *plain) insert(n, writers int) (took series) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for range writers {
		all.Go(func() {
			for range n / writers {
				began := time.Now()
				p.one()
				mu.Lock()
				took = append(took, since(began))
				mu.Unlock()
			}
		})
	}
	all.Wait()
	slices.Sort(took)
	return took
}

// tell inserts n rows at the pace of the events, and announces each through a pipe.
// It returns how long each took until it was read, in ms.
func (p *plain) tell(n int) (took series) {
	p.t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		p.t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	began := make(chan time.Time, 1)
	var reading sync.WaitGroup
	reading.Go(func() {
		for range n {
			if _, err := r.Read(make([]byte, 1)); err != nil {
				p.t.Error(err)
				return
			}
			took = append(took, since(<-began))
		}
	})
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for range n {
		<-tick.C
		began <- time.Now()
		p.one()
		if _, err := w.Write([]byte{1}); err != nil {
			p.t.Fatal(err)
		}
	}
	reading.Wait()
	slices.Sort(took)
	return took
}
