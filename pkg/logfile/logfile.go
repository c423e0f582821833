// Package logfile appends records, one per line, to files that several processes write,
// and limits their size. A file that is full or of an earlier period is renamed, and a
// new one is begun.
//
// A File is a log: writing a line never waits for a lock, and the oldest lines are
// deleted. Commit is for records that must not be lost. Standard limits the standard
// error of a long-lived process. The package never interprets a record.
//
// A process that renames a file holds a lock on the file itself, so no separate lock
// file is needed. The files must be on a local file system.
package logfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Period is how often a new file is begun, even if the current one is not full.
type Period string

// The periods, in UTC.
const (
	Hourly Period = "hourly"
	Daily  Period = "daily"
	Never  Period = "never"
)

// Periods returns all periods.
func Periods() []Period { return []Period{Hourly, Daily, Never} }

// begin returns when the period of t began, or the zero time for Never.
func (p Period) begin(t time.Time) time.Time {
	switch p {
	case Hourly:
		return t.UTC().Truncate(time.Hour)
	case Daily:
		return t.UTC().Truncate(24 * time.Hour)
	}
	return time.Time{}
}

// Limits defines when a new file is begun and how long old files are kept. The zero
// Limits limit nothing.
type Limits struct {
	Max   int64         // bytes of a file; slightly more if several processes write at once
	Every Period        // also begin a new file if the last record is of an earlier period
	Keep  int           // number of old files; 0 means no limit
	For   time.Duration // age of old files since they were renamed; 0 means no limit
}

// due reports whether a record of n bytes belongs into a new file.
func (l Limits) due(file fs.FileInfo, n int, now time.Time) bool {
	if file.Size() == 0 {
		return false
	}
	return l.Max > 0 && file.Size()+int64(n) > l.Max || l.Every.begin(file.ModTime()).Before(l.Every.begin(now))
}

// File is a log that other processes also write. It is safe for concurrent use.
type File struct {
	Path string
	Limits

	mu   sync.Mutex
	file *os.File
}

// Write appends p, which is one or more complete records. Other processes can neither
// tear nor lose it, even if they rename the file meanwhile.
func (f *File) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.ready(len(p)); err != nil {
		return 0, err
	}
	if f.torn() {
		n, err := f.file.Write(append([]byte("\n"), p...))
		return max(n-1, 0), err
	}
	return f.file.Write(p) // one system call, which appends wherever the file ends now
}

// torn reports whether the file ends within a line, because a process was killed there
// or the disk was full. If another process is just writing, the result is an empty
// line.
func (f *File) torn() bool {
	is, err := f.file.Stat()
	if err != nil || is.Size() == 0 {
		return false
	}
	var last [1]byte
	_, err = f.file.ReadAt(last[:], is.Size()-1)
	return err == nil && last[0] != '\n'
}

// Close closes the file. A later Write opens it again.
func (f *File) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		return nil
	}
	err := f.file.Close()
	f.file = nil
	return err
}

// ready ensures that f.file is the file at Path and has space. It ignores errors while
// there is any file to write to, because a record in the wrong file is better than
// none.
func (f *File) ready(n int) error {
	is, err := os.Stat(f.Path)
	if f.file == nil || errors.Is(err, fs.ErrNotExist) || err == nil && !f.same(is) {
		if err := f.open(); f.file == nil {
			return err
		}
	}
	if f.due(n) {
		f.turn(n)
	}
	return nil
}

// same reports whether f.file is the file described by is.
func (f *File) same(is fs.FileInfo) bool {
	own, err := f.file.Stat()
	return err == nil && os.SameFile(own, is)
}

func (f *File) due(n int) bool {
	own, err := f.file.Stat()
	return err == nil && f.Limits.due(own, n, time.Now())
}

// turn begins a new file unless another process holds the lock. It does not wait,
// because that process may have been stopped at any line.
func (f *File) turn(n int) {
	if unix.Flock(int(f.file.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return
	}
	if is, err := os.Stat(f.Path); err == nil && f.same(is) && f.due(n) && turn(f.Path, f.Limits) == nil && f.open() == nil {
		return // the file that had the lock is closed
	}
	_ = unix.Flock(int(f.file.Fd()), unix.LOCK_UN)
}

func (f *File) open() error {
	file, err := os.OpenFile(f.Path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	if f.file != nil {
		_ = f.file.Close() // every write to it has already returned
	}
	f.file = file
	return nil
}

// stampFormat is the format of the time when an old file was renamed, which follows its
// name.
const stampFormat = "20060102T150405.000Z"

type oldFile struct {
	path  string
	ended time.Time
}

// oldFiles returns the renamed files, oldest first.
func oldFiles(path string) ([]oldFile, error) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	var old []oldFile
	for _, e := range entries {
		stamp, ok := strings.CutPrefix(e.Name(), filepath.Base(path)+".")
		if ended, err := time.Parse(stampFormat, stamp); ok && err == nil {
			old = append(old, oldFile{filepath.Join(filepath.Dir(path), e.Name()), ended})
		}
	}
	slices.SortFunc(old, func(a, b oldFile) int { return a.ended.Compare(b.ended) })
	return old, nil
}

// turn renames the file at path, whose lock the caller holds, and removes old files
// beyond the limits.
func turn(path string, l Limits) error {
	old, err := oldFiles(path)
	if err != nil {
		return err
	}
	now := time.Now().UTC().Truncate(time.Millisecond)
	next := now
	if n := len(old); n > 0 && !next.After(old[n-1].ended) { // or the clock was set back
		next = old[n-1].ended.Add(time.Millisecond)
	}
	ended := oldFile{path + "." + next.Format(stampFormat), next}
	if err := os.Rename(path, ended.path); err != nil {
		return err
	}
	old = append(old, ended)
	for i, o := range old {
		if l.Keep > 0 && i < len(old)-l.Keep || l.For > 0 && now.Sub(o.ended) > l.For {
			_ = os.Remove(o.path) // the next turn retries
		}
	}
	return nil
}

// Open opens a file and its old files, oldest first, such that each record is in
// exactly one of them. It is not an error if there are none.
func Open(path string) (files []*os.File, err error) {
	defer func() {
		if err != nil {
			for _, f := range files {
				_ = f.Close() // only read
			}
			files = nil
		}
	}()
	// Open the current file first: if it is renamed afterwards, it is recognized among
	// the old files.
	current, err := os.Open(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	old, err := oldFiles(path)
	if errors.Is(err, fs.ErrNotExist) {
		old, err = nil, nil
	}
	if current != nil {
		defer func() { files = append(files, current) }()
	}
	if err != nil {
		return nil, fmt.Errorf("list old files: %w", err)
	}
	for _, o := range old {
		f, err := os.Open(o.path)
		if errors.Is(err, fs.ErrNotExist) { // removed because of its age
			continue
		}
		if err != nil {
			return files, err
		}
		if current != nil && same(f, current) {
			_ = f.Close()
			continue
		}
		files = append(files, f)
	}
	return files, nil
}

func same(a, b *os.File) bool {
	x, err1 := a.Stat()
	y, err2 := b.Stat()
	return err1 == nil && err2 == nil && os.SameFile(x, y)
}
