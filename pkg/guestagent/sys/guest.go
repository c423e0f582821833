// Package sys is what the rooms of the guest agent share: the guest that they work on,
// bounded reads of its files, its processes, and the programs that they run. It decides
// nothing.
package sys

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// Paths in a guest. Programs that install the guest program depend on them.
const (
	Binary    = "/usr/local/bin/agent-guest"
	SecretDir = "/run/agent"

	// AgentUID is the user that agents run as in every guest.
	AgentUID = 1000
)

// Guest is the machine that the program works on.
type Guest struct {
	Root string // prefix of every path, "" in a real guest
	Fake bool   // an ordinary process: no packet filter, no systemd, DNS on a free loopback port
}

// FromEnv returns the real guest, or the fake one in the directory named by
// AGENT_GUEST_ROOT.
func FromEnv() Guest {
	root := os.Getenv("AGENT_GUEST_ROOT")
	return Guest{Root: root, Fake: root != ""}
}

// Path returns where a path of the guest is for this process.
func (g Guest) Path(p string) string { return filepath.Join(g.Root, p) }

// WriteFile replaces a file so that readers see the old or the new one, even after
// a power failure. It creates missing directories.
func WriteFile(path string, data []byte, mode os.FileMode) error {
	return write(atomicfile.Write, path, data, mode)
}

// WriteUnflushed is like WriteFile, but leaves it to the caller to sync.
func WriteUnflushed(path string, data []byte, mode os.FileMode) error {
	return write(atomicfile.WriteUnflushed, path, data, mode)
}

func write(replace func(string, []byte, os.FileMode) error, path string, data []byte, mode os.FileMode) error {
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = replace(path, data, mode)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// Text returns the text of a file in the guest, or "".
func (g Guest) Text(path string) string { return Text(g.Path(path)) }

// NeedRoot fails unless the process is root or the guest is fake.
func (g Guest) NeedRoot(what string) error {
	if g.Fake || os.Geteuid() == 0 {
		return nil
	}
	return fail.New(fail.Failure, "%s needs root", what).WithHint("sudo agent-guest %s", what)
}

// OneLine returns an error, or several joined ones, as one line for a message.
func OneLine(err error) string {
	return guestproto.Clean(strings.ReplaceAll(err.Error(), "\n", "; "))
}
