// Package atomicfile replaces files: whoever reads one has the old content or
// the new one, and never a part.
package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
)

// Write replaces the file at path. It is on the disk when Write returns, so a
// power cut leaves the old content or the new one.
func Write(path string, content []byte, mode fs.FileMode) error {
	return replace(path, content, mode, createTemp, syncDir)
}

// WriteUnflushed replaces a file that is not worth waiting for the disk: after a
// power cut it may be empty.
func WriteUnflushed(path string, content []byte, mode fs.FileMode) error {
	return replace(path, content, mode, createTemp, nil)
}

// replace flushes the file and, by sync, its directory, unless sync is nil.
func replace(path string, content []byte, mode fs.FileMode, create func(path string) (file, error), sync func(dir string) error) error {
	f, err := create(path)
	if err != nil {
		return err
	}
	if err := fill(f, content, mode, sync != nil); err != nil {
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
	return sync(filepath.Dir(path)) // the name, too, must survive
}

// createTemp creates a file beside path, hidden from what lists the directory.
func createTemp(path string) (file, error) {
	return os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*.tmp")
}

// file is what replace needs of an *os.File. The disk may fail at each of these.
type file interface {
	Name() string
	Write(p []byte) (int, error)
	Chmod(mode fs.FileMode) error
	Sync() error
	Close() error
}

// fill writes a new file and closes it.
func fill(f file, content []byte, mode fs.FileMode, flush bool) error {
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
