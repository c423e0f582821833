package gateway

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

const (
	journalFile = "decisions.jsonl"
	oldSuffix   = ".1"

	// Whatever a guest does, its journal takes two files of this size.
	maxJournal = 8 << 20

	// The same denial again is counted for this long before it is written.
	journalWindow = 5 * time.Second
	maxCounted    = 1024 // decisions that are being counted
	maxPerWindow  = 1000 // lines written in a window; what is over is counted only
	journalQueue  = 1024 // records on their way to the writer

	maxLine     = 16 << 10
	journalPoll = 200 * time.Millisecond // for one who follows
)

// Entry is a line of the journal.
type Entry struct {
	Seq   int64 `json:"seq"`             // grows by one over the journal's life
	Count int64 `json:"count,omitempty"` // how often since the entry before it; absent for once
	Record
}

// Times is how many decisions the entry stands for.
func (e Entry) Times() int64 { return max(e.Count, 1) }

// journal writes records to a file that is bounded in size. Equal denials are
// counted rather than repeated, because the guest chooses how many there are.
type journal struct {
	path  string
	queue chan Record
	done  chan struct{}

	mu      sync.Mutex
	dropped int64 // records that found the queue full
	failed  error // the last error of writing, nil after a success

	// Of the writer only.
	file    *os.File
	size    int64
	torn    bool // the last line may have no end
	seq     int64
	pending map[Record]*pending
	written int
	over    int64
}

type pending struct {
	last  Record
	count int64
}

// openJournal continues the journal in dir.
func openJournal(dir string) (*journal, error) {
	j := &journal{
		path: filepath.Join(dir, journalFile), queue: make(chan Record, journalQueue), done: make(chan struct{}),
		pending: map[Record]*pending{},
	}
	for e, err := range Journal(context.Background(), dir, false) {
		if err != nil {
			return nil, err
		}
		j.seq = e.Seq
	}
	if err := j.open(); err != nil {
		return nil, err
	}
	go j.write()
	return j, nil
}

func (j *journal) open() error {
	f, err := os.OpenFile(j.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	// A line that was cut, by a crash or a full disk, must not swallow the next.
	j.file, j.size, j.torn = f, st.Size(), st.Size() > 0
	return nil
}

// add takes a record; it never blocks, and counts what it cannot take.
func (j *journal) add(r Record) {
	select {
	case j.queue <- r:
	default:
		j.mu.Lock()
		j.dropped++
		j.mu.Unlock()
	}
}

// close writes what is left. Nothing may be added any more.
func (j *journal) close() error {
	close(j.queue)
	<-j.done
	j.mu.Lock()
	defer j.mu.Unlock()
	return errors.Join(j.failed, j.file.Close())
}

// err is why the journal cannot be written, nil when it can.
func (j *journal) err() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.failed
}

func (j *journal) write() {
	defer close(j.done)
	tick := time.NewTicker(journalWindow)
	defer tick.Stop()
	for {
		select {
		case r, ok := <-j.queue:
			if !ok {
				j.flush()
				return
			}
			j.take(r)
		case <-tick.C:
			j.flush()
		}
	}
}

// take writes a decision that was not seen in this window, and counts others.
func (j *journal) take(r Record) {
	if r.Allowed && r.Kind != "dns" {
		j.line(Entry{Record: r}) // a connection: each has its own bytes
		return
	}
	key := r
	key.Time, key.Conn, key.Elapsed, key.BytesIn, key.BytesOut = time.Time{}, 0, 0, 0, 0
	if p, ok := j.pending[key]; ok {
		p.last, p.count = r, p.count+1
		return
	}
	if len(j.pending) >= maxCounted {
		j.over++
		return
	}
	j.pending[key] = &pending{}
	j.line(Entry{Record: r})
}

// flush ends a window.
func (j *journal) flush() {
	j.written = 0
	again := []Entry{}
	for _, p := range j.pending {
		if p.count > 0 {
			again = append(again, Entry{Count: p.count, Record: p.last})
		}
	}
	clear(j.pending)
	slices.SortFunc(again, func(a, b Entry) int { return a.Time.Compare(b.Time) })
	for _, e := range again {
		j.line(e)
	}
	j.mu.Lock()
	j.over += j.dropped
	j.dropped = 0
	j.mu.Unlock()
	if over := j.over; over > 0 {
		j.over = 0
		j.written = 0
		j.line(Entry{Count: over, Record: Record{Time: time.Now(), Kind: "journal", Reason: "too many at once to note each, or no room for them"}})
	}
	j.written = 0
}

func (j *journal) line(e Entry) {
	if j.written >= maxPerWindow {
		j.over += e.Times()
		return
	}
	j.written++
	e.Seq = j.seq + 1
	err := j.append(e)
	if err == nil {
		j.seq = e.Seq
	} else {
		j.over += e.Times()
	}
	j.mu.Lock()
	j.failed = err
	j.mu.Unlock()
}

func (j *journal) append(e Entry) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if j.size+int64(len(b))+2 > maxJournal { // with the ends of lines
		// It is gone already if no new one could be opened the last time.
		if err := os.Rename(j.path, j.path+oldSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := j.file.Close(); err != nil && !errors.Is(err, fs.ErrClosed) {
			return err
		}
		if err := j.open(); err != nil {
			return err
		}
	}
	b = append(b, '\n')
	if j.torn {
		b = append([]byte{'\n'}, b...)
	}
	n, err := j.file.Write(b)
	j.size += int64(n)
	j.torn = err != nil
	return err
}

// Journal reads the decisions of the gateway in dir, oldest first, and with
// follow goes on as they are made until ctx ends. A journal that does not exist
// is empty. Damaged lines are left out: a crash may have cut one.
func Journal(ctx context.Context, dir string, follow bool) func(yield func(Entry, error) bool) {
	return func(yield func(Entry, error) bool) {
		r := reader{path: filepath.Join(dir, journalFile), yield: yield}
		defer r.close()
		err := r.all(r.path + oldSuffix)
		for err == nil {
			if err = r.more(); err != nil || !follow {
				break
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(journalPoll):
			}
		}
		if err != nil && !errors.Is(err, errEnough) {
			yield(Entry{}, fmt.Errorf("read the journal of decisions: %w", err))
		}
	}
}

var errEnough = errors.New("the reader has enough")

// reader follows the journal's file, also when the writer begins a new one.
type reader struct {
	path  string
	yield func(Entry, error) bool
	file  *os.File // nil before there is one
	at    int64    // end of the last whole line
	last  int64    // sequence of the last entry that was yielded
}

func (r *reader) close() {
	if r.file != nil {
		_ = r.file.Close() // only read
	}
}

// all reads a file that is not written any more.
func (r *reader) all(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = r.lines(f, 0)
	return err
}

// more reads what was written since the last time.
func (r *reader) more() error {
	for {
		now, err := os.Open(r.path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // or not there for an instant
		case err != nil:
			return err
		}
		if r.file != nil {
			same, err := sameFile(now, r.file)
			if err != nil || same {
				err = errors.Join(err, now.Close())
			}
			if err != nil {
				return err
			}
			if r.at, err = r.lines(r.file, r.at); err != nil || same {
				return err
			}
			r.close() // it was whole: the writer had left it before we looked
		}
		r.file, r.at = now, 0
	}
}

func sameFile(a, b *os.File) (bool, error) {
	x, err1 := a.Stat()
	y, err2 := b.Stat()
	if err := errors.Join(err1, err2); err != nil {
		return false, err
	}
	return os.SameFile(x, y), nil
}

// lines yields the entries of the whole lines from offset at, and returns the
// offset after them.
func (r *reader) lines(f *os.File, at int64) (int64, error) {
	in := bufio.NewReaderSize(io.NewSectionReader(f, at, 2*maxJournal), maxLine)
	for {
		line, err := in.ReadSlice('\n')
		at += int64(len(line))
		switch {
		case errors.Is(err, bufio.ErrBufferFull): // not one of ours
			continue
		case errors.Is(err, io.EOF):
			return at - int64(len(line)), nil // also a line that is being written
		case err != nil:
			return at, err
		}
		var e Entry
		if json.Unmarshal(bytes.TrimSpace(line), &e) != nil || e.Seq <= r.last {
			continue
		}
		r.last = e.Seq
		if !r.yield(e, nil) {
			return at, errEnough
		}
	}
}

// Denial is what was denied, however often.
type Denial struct {
	Name   string     `json:"name,omitempty"` // "" where an address was asked for
	Addr   netip.Addr `json:"addr,omitzero"`
	Port   uint16     `json:"port,omitempty"` // 0 where a name was only asked for
	Reason string     `json:"reason"`
	Count  int64      `json:"count"`
	First  time.Time  `json:"first"`
	Last   time.Time  `json:"last"`
}

// Target is what was asked for, as a person writes it.
func (d Denial) Target() string {
	switch {
	case d.Name == "" && !d.Addr.IsValid():
		return "-"
	case d.Name == "" && d.Port == 0:
		return d.Addr.String()
	case d.Name == "":
		return netip.AddrPortFrom(d.Addr, d.Port).String()
	case d.Port == 0:
		return d.Name
	}
	return fmt.Sprintf("%s:%d", d.Name, d.Port)
}

// Denials sums up what was denied after a moment, the most frequent first.
func Denials(ctx context.Context, dir string, after time.Time) ([]Denial, error) {
	type key struct {
		name string
		addr netip.Addr
		port uint16
	}
	found := map[key]*Denial{}
	for e, err := range Journal(ctx, dir, false) {
		if err != nil {
			return nil, err
		}
		if e.Allowed || !e.Time.After(after) || e.Name == "" && !e.Addr.IsValid() {
			continue
		}
		k := key{name: e.Name, port: e.Port}
		if e.Kind == KindDNS { // the port is that of the question, not of what was wanted
			k.port = 0
		}
		if e.Name == "" {
			k.addr = e.Addr
		}
		d, ok := found[k]
		if !ok {
			d = &Denial{Name: k.name, Addr: k.addr, Port: k.port, First: e.Time}
			found[k] = d
		}
		d.Reason, d.Last, d.Count = e.Reason, e.Time, d.Count+e.Times()
	}
	out := make([]Denial, 0, len(found))
	for _, d := range found {
		out = append(out, *d)
	}
	slices.SortFunc(out, func(a, b Denial) int {
		if a.Count != b.Count {
			return int(b.Count - a.Count)
		}
		return b.Last.Compare(a.Last)
	})
	return out, nil
}
