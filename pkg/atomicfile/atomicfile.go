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
	return replace(path, content, mode, true)
}

// WriteUnflushed replaces a file that is not worth waiting for the disk: after a
// power cut it may be empty.
func WriteUnflushed(path string, content []byte, mode fs.FileMode) error {
	return replace(path, content, mode, false)
}

func replace(path string, content []byte, mode fs.FileMode, flush bool) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(mode))
	if flush {
		err = errors.Join(err, f.Sync())
	}
	if err = errors.Join(err, f.Close()); err == nil {
		crash.Here(crash.BeforeFile)
		err = os.Rename(f.Name(), path)
		crash.Here(crash.AfterFile)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
