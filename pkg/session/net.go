package session

import (
	"context"
	"slices"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// settings are read anew at every start, so that a changed file counts; what
// was fixed when the session was made (its resources) is not among them.
func (m *Manager) settings(s Session) (config.Settings, error) {
	set, err := m.Config.For(config.RepoKey(s.RepoKey), s.Spec.Profile)
	if err != nil {
		return set, err
	}
	if s.Spec.NetworkMode != "" {
		set.Network.Mode = config.Mode(s.Spec.NetworkMode)
	}
	return set, nil
}

// Policy is the compiled network policy of a session.
func (m *Manager) Policy(s Session) (*policy.Policy, error) {
	set, err := m.settings(s)
	if err != nil {
		return nil, err
	}
	return m.Config.Policy(set, config.Additions{Allow: s.Facts.Allow}, s.Facts.Project)
}

// Allow adds names to the session's policy and, when it runs, to the guest at once.
func (m *Manager) Allow(ctx context.Context, s Session, names []string) (Session, error) {
	for _, name := range names {
		pattern, err := policy.ParsePattern(name)
		if err != nil {
			return s, fail.New(fail.Usage, "%w", err)
		}
		s, err = m.facts(ctx, s.ID, event(EventNet, NetChange{Allow: pattern}), func(f *Facts) {
			if !slices.ContainsFunc(f.Allow, func(r policy.Rule) bool { return r.Pattern == pattern }) {
				f.Allow = append(f.Allow, policy.Rule{Pattern: pattern, Source: "net allow"})
			}
		})
		if err != nil {
			return s, err
		}
	}
	if s.Phase != Ready {
		return s, nil
	}
	return s, m.ApplyPolicy(ctx, s)
}

// ApplyPolicy brings a running guest's policy to what the settings say now.
func (m *Manager) ApplyPolicy(ctx context.Context, s Session) error {
	p, err := m.Policy(s)
	if err != nil {
		return err
	}
	conn, err := m.Dial(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = guest.Guest{SSH: conn, Root: s.Facts.Root}.SetPolicy(ctx, p)
	return err
}
