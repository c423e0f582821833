package sys

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"syscall"
)

const maxText = 1 << 20 // bytes read from any system file

// Names returns the first entries of a directory, or none when the directory
// cannot be read: processes may end while they are inspected.
func Names(dir string, limit int) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	// Readdirnames returns the names that it read even when it fails.
	list, _ := d.Readdirnames(limit)
	return list
}

// Text returns the last maxText bytes of a file, or "" if the file cannot
// be read.
func Text(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() && info.Size() != 0 {
		return ""
	}
	if info.Size() > maxText {
		if _, err := f.Seek(-maxText, io.SeekEnd); err != nil {
			return ""
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, maxText))
	if err != nil {
		return ""
	}
	return string(data)
}

// ReadFile reads a regular file of at most most bytes.
func ReadFile(path string, most int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // do not block on a pipe
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > most {
		return nil, fmt.Errorf("%s must be a regular file of at most %d bytes", path, most)
	}
	var data bytes.Buffer
	_, err = io.Copy(&data, io.LimitReader(f, most))
	return data.Bytes(), err
}
