package lockfile

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// aliveFile is the lock in a directory of TempDir. Its process holds it.
const aliveFile = "alive"

// newDir is how long a directory may have no lock yet, because its process has just created it.
const newDir = time.Minute

// TempDir creates a directory for this process below parent, or below the system's directory for
// temporary files if parent is "". Its name begins with prefix. The process holds the returned lock as
// long as it uses the directory.
//
// Before that, TempDir calls remove for each such directory of this user whose process has died, more
// than a minute after its entries last changed. If remove fails, the next call of TempDir repeats it.
func TempDir(parent, prefix string, remove func(dir string) error) (string, *Lock, error) {
	if parent == "" {
		parent = os.TempDir()
	}
	dirs, _ := filepath.Glob(filepath.Join(parent, prefix+"*")) // fails only for a malformed pattern
	for _, dir := range dirs {
		info, err := os.Lstat(dir)
		if err != nil || !info.IsDir() || !isOwn(info) || time.Since(info.ModTime()) < newDir {
			continue
		}
		if l, free, err := Try(filepath.Join(dir, aliveFile)); err == nil && free {
			_ = remove(dir)
			_ = l.Unlock()
		}
	}
	dir, err := os.MkdirTemp(parent, prefix)
	if err != nil {
		return "", nil, err
	}
	l, free, err := Try(filepath.Join(dir, aliveFile))
	if err == nil && !free { // this process was paused for a minute, and another is about to remove dir
		err = fmt.Errorf("%s was removed", dir)
	}
	if err != nil {
		_ = os.RemoveAll(dir)
		return "", nil, err
	}
	return dir, l, nil
}

func isOwn(info os.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid()
}
