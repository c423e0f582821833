// Package sshconfig adds lines to the user's configuration of OpenSSH, and removes them.
package sshconfig

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
)

// The lines around each block.
const (
	begin = "# begin agent-sessionizer (remove with: agent-sessionizer ssh-config --uninstall)"
	end   = "# end agent-sessionizer"
)

const maxFile = 4 << 20 // bytes

// File is the user's configuration of OpenSSH.
type File struct {
	Path string
	Lock string // path of the lock that changes take
}

// Include makes the file include the files that pattern matches. They are included twice: at the top,
// because OpenSSH uses the first value of most settings, and at the end, because it adds up those of
// SendEnv, which the included files empty. Include reports whether the file had to be changed.
func (f File) Include(ctx context.Context, pattern string) (changed bool, err error) {
	if strings.ContainsAny(pattern, "\"\\\n%?[") {
		return false, fail.New(fail.Host, "OpenSSH cannot include %s: the path has one of the characters \" \\ %% ? [", pattern)
	}
	include := "Include \"" + pattern + "\"\n"
	return f.change(ctx, func(own []byte) []byte {
		top := begin + "\n" + include + end + "\n"
		if len(own) > 0 && !bytes.HasSuffix(own, []byte("\n")) {
			own = append(own, '\n')
		}
		return append(append([]byte(top), own...), begin+"\nMatch all\n"+include+end+"\n"...)
	})
}

// Exclude removes what Include has added, and reports whether there was something.
func (f File) Exclude(ctx context.Context) (changed bool, err error) {
	return f.change(ctx, func(own []byte) []byte { return own })
}

// Includes reports whether the file includes the files that pattern matches, at the top.
func (f File) Includes(pattern string) bool {
	text, err := os.ReadFile(f.Path)
	return err == nil && bytes.HasPrefix(text, []byte(begin+"\nInclude \""+pattern+"\"\n"+end+"\n"))
}

// change replaces the file by what with returns for it, which gets the file without any blocks.
func (f File) change(ctx context.Context, with func(own []byte) []byte) (changed bool, err error) {
	lock, err := lockfile.Wait(ctx, f.Lock, nil)
	if err != nil {
		return false, err
	}
	defer lock.Unlock()
	path, mode := f.Path, fs.FileMode(0o600)
	if real, err := filepath.EvalSymlinks(path); err == nil { // a link into the user's dotfiles stays one
		path = real
	}
	was, err := read(path)
	if err != nil {
		return false, err
	}
	if st, err := os.Stat(path); err == nil {
		mode = st.Mode().Perm()
	}
	own, err := without(was)
	if err != nil {
		return false, fail.New(fail.Conflict, "%s: %w", path, err)
	}
	now := with(own)
	if bytes.Equal(now, was) {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return false, fail.New(fail.Host, "create the directory of OpenSSH's configuration: %w", err)
	}
	if err := atomicfile.Write(path, now, mode); err != nil {
		return false, fail.New(fail.Host, "change OpenSSH's configuration: %w", err)
	}
	return true, nil
}

func read(path string) ([]byte, error) {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fail.New(fail.Host, "read OpenSSH's configuration: %w", err)
	case !st.Mode().IsRegular() || st.Size() > maxFile:
		return nil, fail.New(fail.Host, "%s must be a file of at most 4 MiB", path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fail.New(fail.Host, "read OpenSSH's configuration: %w", err)
	}
	return text, nil
}

// without returns text without the blocks that this package has added.
func without(text []byte) ([]byte, error) {
	var own []byte
	inside := false
	for line := range bytes.Lines(text) {
		switch trimmed := string(bytes.TrimSpace(line)); {
		case trimmed == begin && !inside:
			inside = true
		case trimmed == begin:
			return nil, errors.New("a second line \"" + begin + "\" follows before \"" + end + "\"; remove one of them")
		case trimmed == end && inside:
			inside = false
		case !inside:
			own = append(own, line...)
		}
	}
	if inside {
		return nil, errors.New("no line \"" + end + "\" follows \"" + begin + "\"; add it, or remove the other one")
	}
	return own, nil
}
