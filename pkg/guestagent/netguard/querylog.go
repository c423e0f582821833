package netguard

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const logBytes = 5 << 20 // per file; the log has two

func logFiles(dir string) (older, newer string) {
	return filepath.Join(dir, "queries.1.jsonl"), filepath.Join(dir, "queries.jsonl")
}

// queryLog is the bounded log of DNS queries. It rotates between two files.
type queryLog struct {
	dir string

	mu       sync.Mutex
	file     *os.File
	size     int64
	counters guestproto.Counters
	err      error
}

// openLog continues the log in dir. It ends a last line that a crash may have
// truncated, so that the next line can be parsed.
func openLog(dir string) (*queryLog, error) {
	l := &queryLog{dir: dir}
	older, newer := logFiles(dir)
	for _, path := range []string{older, newer} {
		err := scanLog(path, func(q guestproto.Query, _ []byte) bool {
			l.counters.LastSeq = max(l.counters.LastSeq, q.Seq)
			return true
		})
		if err != nil {
			return nil, err
		}
	}
	if err := l.open(); err != nil {
		return nil, err
	}
	if l.size > 0 {
		n, err := l.file.Write([]byte("\n"))
		l.size += int64(n)
		if err != nil {
			return nil, fmt.Errorf("query log: %w", err)
		}
	}
	return l, nil
}

func (l *queryLog) open() error {
	_, newer := logFiles(l.dir)
	f, err := os.OpenFile(newer, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("query log: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("query log: %w", err), f.Close())
	}
	l.file, l.size = f, info.Size()
	return nil
}

// add numbers, counts and writes one entry. A write error does not stop DNS
// answers; the status reports it.
func (l *queryLog) add(q guestproto.Query) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counters.LastSeq++
	q.Seq = l.counters.LastSeq
	switch {
	case !q.Allowed:
		l.counters.Denied++
	case len(q.Answer) == 1 && q.Answer[0] == "SERVFAIL":
		l.counters.Errors++
	default:
		l.counters.Allowed++
	}
	l.err = l.write(q)
}

func (l *queryLog) write(q guestproto.Query) error {
	line, err := json.Marshal(q)
	if err != nil {
		return fmt.Errorf("query log: %w", err)
	}
	if l.size+int64(len(line)) > logBytes {
		older, newer := logFiles(l.dir)
		if err := errors.Join(l.file.Close(), os.Rename(newer, older), l.open()); err != nil {
			return fmt.Errorf("query log: %w", err)
		}
	}
	n, err := l.file.Write(append(line, '\n'))
	l.size += int64(n)
	return err
}

func (l *queryLog) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.file.Close()
}

func (l *queryLog) status() (guestproto.Counters, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counters, l.err
}

// scanLog calls use for each complete entry of a file, until use returns false.
func scanLog(path string, use func(q guestproto.Query, line []byte) bool) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("query log: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 0, 4096), guestproto.MaxQuery)
	for lines.Scan() {
		var q guestproto.Query
		if json.Unmarshal(lines.Bytes(), &q) != nil || q.Seq <= 0 {
			continue // truncated by a crash
		}
		if !use(q, lines.Bytes()) {
			return nil
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("query log: %w", err)
	}
	return nil
}
