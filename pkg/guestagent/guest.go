// Package guestagent is the program inside a session's VM. It enforces the network
// policy (firewall and DNS), holds the session's secrets in memory, and answers
// git's credential requests.
//
// It is a guard rail, not a security boundary: the agent is root in the guest and
// can disable it. Everything that must hold against root is enforced by the host.
// The program contacts nothing outside the guest except the resolver of the guest's
// network, and writes secrets only to memory-backed files.
package guestagent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// Paths in a guest. Programs that install the guest program depend on them.
const (
	Binary   = "/usr/local/bin/agent-guest"
	UnitFile = "/etc/systemd/system/agent-guest.service"
	unitName = "agent-guest.service"

	unitWanted = "/etc/systemd/system/sysinit.target.wants/" + unitName // the unit is enabled
	etcDir     = "/etc/agent-guest"
	stateDir   = "/run/agent-guest"
	policyIn   = etcDir + "/policy.json"
	upstreams  = etcDir + "/upstream" // resolvers, one address[:port] per line; overrides those from DHCP
	resolvOld  = etcDir + "/resolv.conf.orig"
	socketIn   = "control.sock"
	SecretDir  = "/run/agent"

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

func (g Guest) path(p string) string { return filepath.Join(g.Root, p) }

// writeFile replaces a file so that readers see the old or the new one, even after
// a power failure.
func writeFile(path string, data []byte, mode os.FileMode) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, errWrite := f.Write(data)
	if err := errors.Join(errWrite, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// needRoot fails unless the process is root or the guest is fake.
func (g Guest) needRoot(what string) error {
	if g.Fake || os.Geteuid() == 0 {
		return nil
	}
	return fail.New(fail.Failure, "%s needs root", what).WithHint("sudo agent-guest %s", what)
}

// oneLine returns an error, or several joined ones, as one line for a message.
func oneLine(err error) string {
	return guestproto.Clean(strings.ReplaceAll(err.Error(), "\n", "; "))
}
