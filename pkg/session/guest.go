package session

import (
	"context"
	"fmt"
	"net"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Work asks the guest what destroying the session would lose.
func (m *Manager) Work(ctx context.Context, s Session, g repo.Guest) (repo.WorkState, error) {
	known, err := repo.Known(ctx, s.Name, s.Facts.Target)
	if err != nil {
		return repo.WorkState{}, err
	}
	return repo.Work(ctx, g, s.Facts.Dir, *s.Facts.Base, known...)
}

// Fetch brings the agent's commits to this host: to the repository's mirror,
// and this time to the local clone too unless it is "".
func (m *Manager) Fetch(ctx context.Context, s Session, g repo.Guest, clone string, o repo.FetchOptions) (repo.FetchResult, error) {
	into, keep := s.Facts.Target.With(clone)
	res, err := repo.Fetch(ctx, g, s.Facts.Dir, s.Name, into, *s.Facts.Base, o)
	if err != nil {
		return res, err
	}
	_, err = m.facts(ctx, s.ID, event(EventFetch, FetchDone{Refs: len(res.Refs), Commits: res.Commits}), func(f *Facts) { f.Target = keep })
	return res, err
}

// Shown records which local tmux server shows the session, for destroy.
func (m *Manager) Shown(ctx context.Context, s Session, socket string) error {
	if s.Facts.Tmux == socket {
		return nil
	}
	_, err := m.facts(ctx, s.ID, store.Event{}, func(f *Facts) { f.Tmux = socket })
	return err
}

// SSHConfig is an OpenSSH client configuration block for a running session,
// with its own key and its pinned host key.
func (m *Manager) SSHConfig(s Session) (string, error) {
	host, port, err := net.SplitHostPort(s.Facts.Endpoint.Addr)
	if err != nil {
		return "", fail.New(fail.Conflict, "session %s has no running VM", s.Name).WithHint("agent-sessionizer start %s", s.Name)
	}
	known := filepath.Join(m.Config.Paths.SessionDir(s.ID), "known_hosts")
	if err := writeFile(known, []byte(s.Name+" "+s.Facts.Endpoint.HostKey+"\n")); err != nil {
		return "", err
	}
	return fmt.Sprintf(`Host %s
  HostName %s
  Port %s
  User %s
  IdentityFile "%s"
  IdentitiesOnly yes
  HostKeyAlias %s
  UserKnownHostsFile "%s"
  StrictHostKeyChecking yes
  ForwardAgent no

`, s.Name, host, port, s.Facts.Endpoint.User, m.keyFile(s.ID), s.Name, known), nil
}
