package task

import (
	"context"
	"fmt"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// Check refuses a manifest that Submit would refuse, for the same reasons: it reports
// what this host lacks for the task, as far as that can be known without creating
// anything. The notices are those of Submit.
func (m *Manager) Check(ctx context.Context, asked *manifest.Task) (notices []string, err error) {
	found, err := m.check(ctx, asked, false)
	return found.notices, err
}

// checked holds what a manifest refers to.
type checked struct {
	session session.Session // the session that the task runs in; the zero Session if the task gets its own
	slug    string          // of the repository
	notices []string
}

// check does the work of Check, for a restricted or unrestricted task.
func (m *Manager) check(ctx context.Context, asked *manifest.Task, restricted bool) (checked, error) {
	if asked.VM.Session != "" {
		s, field, err := findSession(ctx, m.Sessions, asked)
		if err != nil {
			return checked{}, asked.Refuse(manifest.Fault{Field: field, Err: err})
		}
		return checked{session: s, slug: s.Session.Repo}, nil
	}
	if faults := faultsOf(m.Sessions.Config, asked, restricted); len(faults) > 0 {
		return checked{}, asked.Refuse(faults...)
	}
	r, err := sessionRequest(asked, restricted)
	if err != nil {
		return checked{}, err
	}
	notices, err := m.Sessions.Check(r)
	return checked{slug: r.Repo.Slug, notices: notices}, err
}

// faultsOf returns the fields that name something this host does not have or accept, in
// the order of the manifest's format.
func faultsOf(c *config.Config, asked *manifest.Task, restricted bool) (faults []manifest.Fault) {
	add := func(field string, err error) {
		if err != nil {
			faults = append(faults, manifest.Fault{Field: field, Err: err})
		}
	}
	r, err := sessionRequest(asked, restricted)
	add("repository.url", err)
	key := config.RepoKey(r.Repo.Key)
	if _, err := c.For(key, ""); err == nil && asked.VM.Profile != "" { // otherwise the profile is not the cause
		_, err := c.For(key, asked.VM.Profile)
		add("vm.profile", err)
	}
	set, _ := c.For(key, asked.VM.Profile) // its error is above
	for i, s := range asked.Secrets {
		at := func(name string) string { return fmt.Sprintf("secrets[%d].%s", i, name) }
		if _, err := secret.ParseRef(s.Name, "env:X"); err != nil {
			add(at("name"), err)
			continue
		}
		if _, err := session.CheckSecret(c, s.Name, r.Secrets[s.Name], set.Network.Enforced()); err != nil {
			add(at("key"), err)
			continue
		}
		for _, err := range secret.Check([]secret.Ref{{Name: s.Name, Source: s.Ref()}}) { // a warning would be missed
			add(at("key"), err)
		}
	}
	return faults
}
