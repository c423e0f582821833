package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Mirrors returns the host's copies of remote repositories, within the settings'
// limits.
func (m *Manager) Mirrors() *repo.Mirrors {
	l := m.Config.Limits
	return &repo.Mirrors{Dir: m.Config.Paths.Mirrors(), Self: m.Self, Bounds: repo.Bounds{Bytes: int64(l.MirrorSize), Refs: l.MirrorRefs, Time: l.MirrorTime}}
}

// These limit the bytes that a guest makes the host fetch, at one time and in total.
const (
	guestFetch   = 1 << 30
	guestFetches = 4 << 30
)

// Work is the agents' work in sessions.
type Work struct {
	Sessions *Manager
	ByGuest  bool // a guest asked for it, as often as it likes
}

// Unsaved asks the guest what work would be lost if the session were destroyed.
func (w Work) Unsaved(ctx context.Context, s Session, g repo.Guest) (repo.WorkState, error) {
	known, err := repo.Known(ctx, s.Name, s.Status.Target)
	if err != nil {
		return repo.WorkState{}, err
	}
	return repo.Work(ctx, g, s.Status.Dir, *s.Status.Base, known...)
}

// Fetch copies the agent's commits to the repository's mirror on this host. It also
// copies them to the local clone this time, unless clone is "".
func (w Work) Fetch(ctx context.Context, s Session, g repo.Guest, clone string, o repo.FetchOptions) (repo.FetchResult, error) {
	into, keep := s.Status.Target.With(clone)
	if w.ByGuest {
		o.MaxBytes = min(guestFetch, guestFetches-s.Status.GuestFetched)
		if o.MaxBytes <= 0 {
			return repo.FetchResult{}, fail.New(fail.Conflict, "the commits that were fetched for subtasks have %d MiB, which is the limit", s.Status.GuestFetched>>20).
				WithHint("leave repository.commit out")
		}
	}
	res, err := repo.Fetch(ctx, g, s.Status.Dir, s.Name, into, *s.Status.Base, o)
	if err != nil {
		if w.ByGuest && res.Bytes > 0 {
			_, cerr := w.Sessions.updateStatus(context.WithoutCancel(ctx), s.ID, store.Event{}, func(f *Status) { f.GuestFetched += res.Bytes })
			err = errors.Join(err, cerr)
		}
		return res, err
	}
	record := w.Sessions.updateStatus
	if w.ByGuest {
		record = w.Sessions.appendFromGuest
	}
	_, err = record(ctx, s.ID, store.NewEvent(EventFetch, FetchDone{Refs: len(res.Refs), Commits: res.Commits}), func(f *Status) {
		f.Target = keep
		if w.ByGuest {
			f.GuestFetched += res.Bytes
		}
	})
	return res, err
}

// SetTmuxSocket records which local tmux server shows the session; destroy needs to know.
func (m *Manager) SetTmuxSocket(ctx context.Context, s Session, socket string) error {
	if s.Status.Tmux == socket {
		return nil
	}
	_, err := m.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Tmux = socket })
	return err
}

// MarkVisited records that a user attaches now.
func (m *Manager) MarkVisited(ctx context.Context, s Session) error {
	_, err := m.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Attached = time.Now() })
	return err
}

// SSHHost is how an OpenSSH client logs in to a running session: with the session's
// own key, trusting only its pinned host key.
type SSHHost struct {
	Host           string `json:"host"` // the session's name
	Hostname       string `json:"hostname"`
	Port           string `json:"port"`
	User           string `json:"user"`
	IdentityFile   string `json:"identity_file"`
	HostKey        string `json:"host_key"`
	KnownHostsFile string `json:"known_hosts_file"` // names the host as Host

	Forwards bool `json:"-"` // whether forwards from the user's configuration and command line are allowed
}

// SSHConfig returns the session's SSHHost and writes its file of known hosts.
func (c Connections) SSHConfig(s Session) (SSHHost, error) {
	host, port, err := net.SplitHostPort(s.Status.Endpoint.Addr)
	if err != nil {
		return SSHHost{}, fail.New(fail.Conflict, "session %s has no running VM", s.Name).WithHint("agent-sessionizer start %s", s.Name)
	}
	h := SSHHost{
		Host: s.Name, Hostname: host, Port: port, User: s.Status.Endpoint.User, IdentityFile: c.keyFile(s.ID),
		HostKey: s.Status.Endpoint.HostKey, KnownHostsFile: filepath.Join(c.Paths.SessionDir(s.ID), "known_hosts"),
	}
	return h, writeFile(h.KnownHostsFile, []byte(h.Host+" "+h.HostKey+"\n"))
}

// String returns the block for an OpenSSH configuration. OpenSSH uses the first value
// of most settings, so the values of a later "Host *" do not apply to the guest.
// SendEnv values add up instead; the block removes them again where it is also last.
// The user's forwards are cleared unless Forwards is set.
func (h SSHHost) String() string {
	return fmt.Sprintf(`Host %s
  HostName %s
  Port %s
  User %s
  IdentityFile "%s"
  HostKeyAlias %s
  UserKnownHostsFile "%s"
%s
`, h.Host, h.Hostname, h.Port, h.User, h.IdentityFile, h.Host, h.KnownHostsFile, sshSettings(h.Forwards))
}

// sshSettings returns the settings that are the same for every guest.
func sshSettings(forwards bool) string {
	clearForwards := "yes"
	if forwards {
		clearForwards = "no"
	}
	var b strings.Builder
	for _, setting := range []string{
		"IgnoreUnknown *", // older versions of OpenSSH lack some of these
		"GlobalKnownHostsFile /dev/null", "KnownHostsCommand none", "StrictHostKeyChecking yes", "NoHostAuthenticationForLocalhost no",
		"VerifyHostKeyDNS no", "UpdateHostKeys no", "CheckHostIP no", "CanonicalizeHostname no",
		"IdentitiesOnly yes", "IdentityAgent none", "AddKeysToAgent no", "PKCS11Provider none", "PubkeyAuthentication yes", "PasswordAuthentication no",
		"KbdInteractiveAuthentication no", "HostbasedAuthentication no", "GSSAPIAuthentication no", "GSSAPIDelegateCredentials no",
		"ForwardAgent no", "ForwardX11 no", "ForwardX11Trusted no", "Tunnel no", "ClearAllForwardings " + clearForwards, "GatewayPorts no", "PermitRemoteOpen none",
		"ProxyCommand none", "ProxyJump none", "ControlMaster no", "ControlPath none", "ControlPersist no",
		"PermitLocalCommand no", "LocalCommand none", "RemoteCommand none", "SessionType default", "ForkAfterAuthentication no", "StdinNull no",
		"EnableEscapeCommandline no", "SetEnv LC_AGENT=1", "SendEnv -*",
	} {
		b.WriteString("  " + setting + "\n")
	}
	return b.String()
}
