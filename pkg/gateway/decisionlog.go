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
	decisionLogFile = "decisions.jsonl"
	oldSuffix       = ".1"

	// Size limit of one file of the decision log. The log uses two files at most,
	// whatever a guest does.
	maxDecisionLog = 8 << 20

	// How long an equal denial is only counted before the count is written.
	decisionWindow = 5 * time.Second
	maxCounted     = 1024 // decisions that are being counted
	maxPerWindow   = 1000 // lines written in a window; the rest is only counted
	decisionQueue  = 1024 // records on their way to the writer

	maxLine      = 16 << 10
	decisionPoll = 200 * time.Millisecond // for a reader that follows
)

// Entry is a line of the decision log.
type Entry struct {
	Seq   int64 `json:"seq"`             // grows by one over the log's life
	Count int64 `json:"count,omitempty"` // occurrences since the previous entry; absent if one
	Record
}

// Times returns how many decisions the entry stands for.
func (e Entry) Times() int64 { return max(e.Count, 1) }

// decisionLog writes records to the decision log, a file of bounded size. It counts equal
// denials instead of repeating them, because the guest chooses how many there are.
type decisionLog struct {
	path  string
	queue chan Record
	done  chan struct{}

	mu      sync.Mutex
	dropped int64 // records that found the queue full
	failed  error // the last write's error, nil if it succeeded

	// The fields below belong to the writer.
	file    *os.File
	size    int64
	torn    bool // the last line may be incomplete
	seq     int64
	pending map[Record]*pending
	written int
	over    int64
}

type pending struct {
	last  Record
	count int64
}

// openDecisionLog opens the decision log in dir and continues its numbering.
func openDecisionLog(dir string) (*decisionLog, error) {
	j := &decisionLog{
		path: filepath.Join(dir, decisionLogFile), queue: make(chan Record, decisionQueue), done: make(chan struct{}),
		pending: map[Record]*pending{},
	}
	for e, err := range Decisions(context.Background(), dir, false) {
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

func (j *decisionLog) open() error {
	f, err := os.OpenFile(j.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	// A line that a crash or a full disk cut off must not swallow the next one.
	j.file, j.size, j.torn = f, st.Size(), st.Size() > 0
	return nil
}

// add queues a record. It never blocks, and counts the records for which the queue has
// no space.
func (j *decisionLog) add(r Record) {
	select {
	case j.queue <- r:
	default:
		j.mu.Lock()
		j.dropped++
		j.mu.Unlock()
	}
}

// close writes everything that is queued or counted. add must not be called afterwards.
func (j *decisionLog) close() error {
	close(j.queue)
	<-j.done
	j.mu.Lock()
	defer j.mu.Unlock()
	return errors.Join(j.failed, j.file.Close())
}

// err returns why the log cannot be written, or nil if it can.
func (j *decisionLog) err() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.failed
}

func (j *decisionLog) write() {
	defer close(j.done)
	tick := time.NewTicker(decisionWindow)
	defer tick.Stop()
	for {
		select {
		case r, ok := <-j.queue:
			if !ok {
				j.flush()
				return
			}
			j.aggregate(r)
		case <-tick.C:
			j.flush()
		}
	}
}

// aggregate writes a decision that is new in this window, and counts repetitions.
func (j *decisionLog) aggregate(r Record) {
	if r.Allowed && r.Kind != "dns" {
		j.line(Entry{Record: r}) // a connection; each has its own byte counts
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
func (j *decisionLog) flush() {
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
		j.line(Entry{Count: over, Record: Record{Time: time.Now(), Kind: KindLog, Reason: "too many decisions at once to log each, or no disk space"}})
	}
	j.written = 0
}

func (j *decisionLog) line(e Entry) {
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

func (j *decisionLog) append(e Entry) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if j.size+int64(len(b))+2 > maxDecisionLog { // two newlines
		// The file is already gone if no new one could be opened the last time.
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

// Decisions reads the decision log of the gateway in dir, oldest entry first. With
// follow, it continues with new entries until ctx ends. A log that does not exist is
// empty. Decisions skips damaged lines, because a crash may have cut one off.
func Decisions(ctx context.Context, dir string, follow bool) func(yield func(Entry, error) bool) {
	return func(yield func(Entry, error) bool) {
		r := reader{path: filepath.Join(dir, decisionLogFile), yield: yield}
		defer r.close()
		err := r.all(r.path + oldSuffix)
		for err == nil {
			if err = r.more(); err != nil || !follow {
				break
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(decisionPoll):
			}
		}
		if err != nil && !errors.Is(err, errEnough) {
			yield(Entry{}, fmt.Errorf("read the decision log: %w", err))
		}
	}
}

var errEnough = errors.New("the reader stopped")

// reader follows the log's file across rotations.
type reader struct {
	path  string
	yield func(Entry, error) bool
	file  *os.File // nil until the file exists
	at    int64    // end of the last complete line
	last  int64    // sequence number of the last yielded entry
}

func (r *reader) close() {
	if r.file != nil {
		_ = r.file.Close() // only read
	}
}

// all reads a file that is no longer being written.
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

// more reads what was written since the last call.
func (r *reader) more() error {
	for {
		now, err := os.Open(r.path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // or missing for an instant, during a rotation
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
			r.close() // read completely: the writer left it before it was compared
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

// lines yields the entries of the complete lines from offset at, and returns the offset
// after them.
func (r *reader) lines(f *os.File, at int64) (int64, error) {
	in := bufio.NewReaderSize(io.NewSectionReader(f, at, 2*maxDecisionLog), maxLine)
	for {
		line, err := in.ReadSlice('\n')
		at += int64(len(line))
		switch {
		case errors.Is(err, bufio.ErrBufferFull): // not a line of a decision log
			continue
		case errors.Is(err, io.EOF):
			return at - int64(len(line)), nil // also when a line is still being written
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

// Denial is one denied destination with all its occurrences.
type Denial struct {
	Name    string     `json:"name,omitempty"` // "" if an address was asked for
	Addr    netip.Addr `json:"addr,omitzero"`
	Port    uint16     `json:"port,omitempty"`    // 0 if a name was only looked up
	Request string     `json:"request,omitempty"` // METHOD URL, if the connection was allowed
	Reason  string     `json:"reason"`
	Count   int64      `json:"count"`
	First   time.Time  `json:"first"`
	Last    time.Time  `json:"last"`
}

// Target returns the destination as a person writes it.
func (d Denial) Target() string {
	switch {
	case d.Request != "":
		return d.Request
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

// Denials summarizes what was denied after a point in time, the most frequent
// destination first.
func Denials(ctx context.Context, dir string, after time.Time) ([]Denial, error) {
	type key struct {
		name string
		addr netip.Addr
		port uint16

		request string
	}
	found := map[key]*Denial{}
	for e, err := range Decisions(ctx, dir, false) {
		if err != nil {
			return nil, err
		}
		if e.Allowed || !e.Time.After(after) || e.Name == "" && !e.Addr.IsValid() {
			continue
		}
		k := key{name: e.Name, port: e.Port, request: e.Request}
		if e.Kind == KindDNS { // the port is DNS's own, not the destination's
			k.port = 0
		}
		if e.Name == "" {
			k.addr = e.Addr
		}
		d, ok := found[k]
		if !ok {
			d = &Denial{Name: k.name, Addr: k.addr, Port: k.port, Request: k.request, First: e.Time}
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
