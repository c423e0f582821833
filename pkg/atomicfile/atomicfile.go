// Package atomicfile replaces and creates files atomically: a reader sees the old content or the new
// content, never a mixture or a part.
package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
)

// Write replaces the file at path. The new content is on disk when Write returns; a power
// cut leaves either the old content or the new.
func Write(path string, content []byte, mode fs.FileMode) error {
	return replace(path, content, mode, createTemp, syncDir)
}

// WriteUnflushed replaces the file at path without waiting for the disk. After a power cut
// the file may be empty.
func WriteUnflushed(path string, content []byte, mode fs.FileMode) error {
	return replace(path, content, mode, createTemp, nil)
}

// Create creates the file at path, as a whole. The error is fs.ErrExist, wrapped, if it exists already. The
// content is on disk when Create returns. The file system must support hard links.
func Create(path string, content []byte, mode fs.FileMode) error {
	f, err := createTemp(path)
	if err != nil {
		return err
	}
	err = writeAndClose(f, content, mode, true)
	if err == nil {
		err = os.Link(f.Name(), path) // unlike a rename, it replaces nothing
	}
	if err := errors.Join(err, os.Remove(f.Name())); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// replace writes the file under a temporary name and renames it to path. If sync is not
// nil, replace flushes the file and calls sync on its directory.
func replace(path string, content []byte, mode fs.FileMode, create func(path string) (file, error), sync func(dir string) error) error {
	f, err := create(path)
	if err != nil {
		return err
	}
	if err := writeAndClose(f, content, mode, sync != nil); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	crash.Here(crash.BeforeFile)
	err = os.Rename(f.Name(), path)
	crash.Here(crash.AfterFile)
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	if sync == nil {
		return nil
	}
	return sync(filepath.Dir(path)) // the name must survive a power cut, too
}

// createTemp creates a temporary file beside path, with a leading dot that hides it from
// directory listings.
func createTemp(path string) (file, error) {
	return os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*.tmp")
}

// file is the part of *os.File that replace uses. A disk failure can surface in each of
// these methods but Name.
type file interface {
	Name() string
	Write(p []byte) (int, error)
	Chmod(mode fs.FileMode) error
	Sync() error
	Close() error
}

// writeAndClose writes and closes a new file.
func writeAndClose(f file, content []byte, mode fs.FileMode, flush bool) error {
	_, err := f.Write(content)
	err = errors.Join(err, f.Chmod(mode))
	if flush {
		err = errors.Join(err, f.Sync())
	}
	return errors.Join(err, f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
