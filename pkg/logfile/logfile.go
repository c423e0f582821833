// Package logfile appends records, one a line, to files that several processes
// write, and keeps those files bounded: a file that is full, or of another day, is
// renamed and a new one begun.
//
// A File is a log: nobody waits for a lock to write a line, and the oldest lines
// go. Commit is for records that must not be lost. Standard bounds the standard
// error of a process that lives long. None knows what a record says.
//
// Who renames holds a lock on the file itself, so that there is nothing beside it
// to keep; it has to be on a file system of this host.
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

// Period is how often a new file is begun, besides when one is full.
type Period string

// The periods, of UTC.
const (
	Hourly Period = "hourly"
	Daily  Period = "daily"
	Never  Period = "never"
)

// Periods are all of them.
func Periods() []Period { return []Period{Hourly, Daily, Never} }

// begin is when the period of t began; zero for one that has no end.
func (p Period) begin(t time.Time) time.Time {
	switch p {
	case Hourly:
		return t.UTC().Truncate(time.Hour)
	case Daily:
		return t.UTC().Truncate(24 * time.Hour)
	}
	return time.Time{}
}

// Limits say when a new file is begun and how long old ones stay. The zero Limits
// bound nothing.
type Limits struct {
	Max   int64         // bytes of a file; somewhat more where several write at once
	Every Period        // and when the last record is of an earlier period
	Keep  int           // at most so many old files; 0 is no bound
	For   time.Duration // old files go when they were ended so long ago; 0 is no bound
}

// due says whether a record of n bytes belongs into a new file.
func (l Limits) due(file fs.FileInfo, n int, now time.Time) bool {
	if file.Size() == 0 {
		return false
	}
	return l.Max > 0 && file.Size()+int64(n) > l.Max || l.Every.begin(file.ModTime()).Before(l.Every.begin(now))
}

// File is a log that other processes write, too. Safe for concurrent use.
type File struct {
	Path string
	Limits

	mu   sync.Mutex
	file *os.File
}

// Write appends p, which is one record or several, whole. What another process
// does meanwhile, even to rename the file, neither tears nor loses it.
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
	return f.file.Write(p) // one system call, at the end of the file wherever that is
}

// torn says whether the file ends within a line: a process was killed there, or
// the disk was full. Or one is writing just now; then there is an empty line.
func (f *File) torn() bool {
	is, err := f.file.Stat()
	if err != nil || is.Size() == 0 {
		return false
	}
	var last [1]byte
	_, err = f.file.ReadAt(last[:], is.Size()-1)
	return err == nil && last[0] != '\n'
}

// Close closes the file; a later Write opens it again.
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

// ready sees to it that f.file is the file at Path, and one with room. What only
// keeps it from being so is passed over while there is some file to write to: a
// record in the wrong file is better than none.
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

// same says whether f.file is the file that is.
func (f *File) same(is fs.FileInfo) bool {
	own, err := f.file.Stat()
	return err == nil && os.SameFile(own, is)
}

func (f *File) due(n int) bool {
	own, err := f.file.Stat()
	return err == nil && f.Limits.due(own, n, time.Now())
}

// turn begins a new file, if no other process is about to: one that is may have
// been stopped at any line.
func (f *File) turn(n int) {
	if unix.Flock(int(f.file.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return
	}
	if is, err := os.Stat(f.Path); err == nil && f.same(is) && f.due(n) && turn(f.Path, f.Limits) == nil && f.open() == nil {
		return // what had the lock is closed
	}
	_ = unix.Flock(int(f.file.Fd()), unix.LOCK_UN)
}

func (f *File) open() error {
	file, err := os.OpenFile(f.Path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	if f.file != nil {
		_ = f.file.Close() // every write to it has been told of
	}
	f.file = file
	return nil
}

// An old file has the time when it was ended behind its name.
const stampFormat = "20060102T150405.000Z"

type oldFile struct {
	path  string
	ended time.Time
}

// oldFiles are those that were renamed, oldest first.
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

// turn renames the file at path, whose lock the caller holds, and removes the old
// files that are too many or too old.
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
			_ = os.Remove(o.path) // the next turn tries again
		}
	}
	return nil
}

// Open opens a file and its old ones, oldest first, such that each record is in
// one of them, and in one only. None of them is an error.
func Open(path string) (files []*os.File, err error) {
	defer func() {
		if err != nil {
			for _, f := range files {
				_ = f.Close() // only read
			}
			files = nil
		}
	}()
	// The current one first: if it is renamed after that, it is found again.
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
		return nil, fmt.Errorf("look for old files: %w", err)
	}
	for _, o := range old {
		f, err := os.Open(o.path)
		if errors.Is(err, fs.ErrNotExist) { // it was too old
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
