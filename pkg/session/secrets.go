package session

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/login"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// secrets are the secrets of one start of a session.
type secrets struct {
	refs   []secret.Ref // sorted by name, so that errors have a stable order
	bound  map[string]config.Secret
	values map[string]secret.Value // nil until they are resolved
	failed secret.Unresolved       // of those that stay on the host
	logins []login.Login           // of the host
}

// boundSecrets checks references and bindings, without resolving anything. enforced says whether
// the session has a gateway, which secrets that stay on the host need.
func boundSecrets(c *config.Config, m map[string]config.Secret, enforced bool) (secrets, error) {
	s := secrets{bound: make(map[string]config.Secret, len(m))}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		ref, err := secret.ParseRef(name, m[name].From)
		if err != nil {
			return s, err
		}
		to, err := c.Bound(name, m[name])
		if err != nil {
			return s, err
		}
		if !to.Guest && !enforced {
			return s, fail.New(fail.Usage, "secret %s stays on the host, but without the gateway (network.enforce: false) no request can use it", name).
				WithHint("agent-sessionizer config edit config.yaml # guest: true puts it into the guest")
		}
		s.refs, s.bound[name] = append(s.refs, ref), to
	}
	return s, nil
}

// CheckSecret checks the reference and the binding of a secret, without resolving it.
func CheckSecret(c *config.Config, name string, s config.Secret, enforced bool) (warnings []string, err error) {
	one, err := boundSecrets(c, map[string]config.Secret{name: s}, enforced)
	if err != nil {
		return nil, err
	}
	return one.check()
}

// check checks the sources as far as that is possible without resolving them. A secret that stays
// on the host need not have a value: only the requests that need it fail.
func (s secrets) check() (warnings []string, err error) {
	var errs []error
	for _, ref := range s.refs {
		for _, err := range secret.Check([]secret.Ref{ref}) {
			if !s.bound[ref.Name].Guest && fail.CodeOf(err) == fail.Secret {
				warnings = append(warnings, err.Error())
				continue
			}
			errs = append(errs, err)
		}
	}
	if len(s.refs) > secret.MaxSecrets {
		errs = append(errs, fail.New(fail.Usage, "%d secrets are more than the limit of %d", len(s.refs), secret.MaxSecrets))
	}
	if len(errs) > 0 {
		return nil, fail.New(fail.CodeOf(errs[0]), "%w", errors.Join(errs...)).WithHint("%s", fail.HintOf(errs[0]))
	}
	return append(warnings, secret.Warnings(s.refs)...), nil
}

// resolve reads the values; ask gets those that another host resolves. Its error is about those that
// the guest would have.
func (s *secrets) resolve(ctx context.Context, self string, ask func([]secret.Ref) (map[string]secret.Value, error)) error {
	var here, there []secret.Ref
	for _, r := range s.refs {
		if r.Kind() == secret.Submitter {
			there = append(there, r)
		} else {
			here = append(here, r)
		}
	}
	s.values, s.failed = map[string]secret.Value{}, secret.Unresolved{}
	for _, source := range []func() (map[string]secret.Value, error){
		func() (map[string]secret.Value, error) { return secret.ResolveInChild(ctx, self, here) },
		func() (map[string]secret.Value, error) { return ask(there) },
	} {
		values, err := source()
		maps.Copy(s.values, values)
		failed, ok := errors.AsType[secret.Unresolved](err)
		if err != nil && !ok {
			return err
		}
		for name, err := range failed {
			if s.bound[name].Guest {
				return failed
			}
			s.failed[name] = err
		}
	}
	return nil
}

// gateway returns what the gateway gets.
func (s secrets) gateway() (all []gateway.Secret) {
	for _, ref := range s.refs {
		to := s.bound[ref.Name]
		if to.Guest {
			continue
		}
		one := gateway.Secret{Name: ref.Name, Like: to.Like, Value: s.values[ref.Name], Body: to.Body}
		for _, host := range to.To {
			one.Hosts = append(one.Hosts, string(host))
		}
		if err := s.failed[ref.Name]; err != nil {
			one.Problem = err.Error()
		}
		all = append(all, one)
	}
	return append(all, loginSecrets(s.logins)...)
}

// guest returns what the guest gets: values, and the gateway's placeholders.
func (s secrets) guest(placeholders map[string]string) map[string]secret.Value {
	all := make(map[string]secret.Value, len(s.refs))
	for _, ref := range s.refs {
		if s.bound[ref.Name].Guest {
			all[ref.Name] = s.values[ref.Name]
		} else {
			all[ref.Name] = secret.NewValue(placeholders[ref.Name])
		}
	}
	return all
}

// Secrets brings the secrets of running sessions to their gateways and guests.
type Secrets struct{ Sessions *Manager }

// Refresh resolves the references of a running session again. The guest keeps its placeholders,
// and gets new values of the secrets that it has itself.
func (x Secrets) Refresh(ctx context.Context, s Session, redact func(...secret.Value)) (Session, []string, error) {
	if s.Phase != Ready {
		return s, nil, fail.New(fail.Conflict, "session %s is %s; its secrets are resolved when it starts", s.Name, s.Phase).WithHint("agent-sessionizer start %s", s.Name)
	}
	settings, err := Net(x).settings(s)
	if err != nil {
		return s, nil, err
	}
	all, err := boundSecrets(x.Sessions.Config, settings.Secrets, s.Spec.Enforced)
	if err != nil {
		return s, nil, err
	}
	all.logins = x.logins(s, settings)
	if err := x.resolve(ctx, s, &all, redact, func(string) {}); err != nil {
		return s, nil, err
	}
	conn, err := Connections{Paths: x.Sessions.Config.Paths}.Dial(ctx, s)
	if err != nil {
		return s, nil, err
	}
	defer conn.Close()
	s, err = x.deliver(ctx, s, s.Guest(conn), all, redact)
	return s, all.warnings(), err
}

// restrict takes from the gateway what the settings no longer bind. The rules that limited what a
// secret may do disappear from the policy with its binding, so this comes before a change of the
// policy.
func (x Secrets) restrict(ctx context.Context, s Session, g gateway.Process) error {
	settings, err := Net(x).settings(s)
	if err != nil {
		return err
	}
	bound := loginSecrets(x.logins(s, settings))
	for name, one := range settings.Secrets {
		// A secret with an error is not bound. The error is reported where secrets are checked.
		if valid, err := boundSecrets(x.Sessions.Config, map[string]config.Secret{name: one}, s.Spec.Enforced); err == nil {
			bound = append(bound, valid.gateway()...)
		}
	}
	if err := g.RestrictSecrets(ctx, bound); err != nil {
		return fail.New(fail.CodeOf(err), "%w", err).WithHint("agent-sessionizer start %s", s.Name)
	}
	return nil
}

// logins returns the logins of the host that a session uses.
func (x Secrets) logins(s Session, set config.Settings) []login.Login {
	if !s.Spec.Enforced {
		return nil
	}
	return Logins(x.Sessions.Config.Paths, set.Logins, set.Secrets)
}

// resolve resolves the secrets of a session, and records that. It reports what it waits for.
func (x Secrets) resolve(ctx context.Context, s Session, all *secrets, redact func(...secret.Value), report func(string)) error {
	err := all.resolve(ctx, x.Sessions.Self, func(refs []secret.Ref) (map[string]secret.Value, error) {
		return askSubmitter(ctx, x.Sessions.Config.Paths.SecretsSocket(), refs, submitterWait, report)
	})
	redact(slices.Collect(maps.Values(all.values))...)
	names := make([]string, len(all.refs)) // sorted
	for i, r := range all.refs {
		names[i] = r.Name
	}
	x.Sessions.audit(ctx, audit.SecretAccessed, s.Status.RequestedBy.Actor, "session:"+s.ID, err, s.details(map[string]any{"secrets": names}))
	return err
}

// deliver creates the session's token and puts it, secrets and placeholders into the guest's
// memory, and the values of the placeholders into the gateway's. The host keeps only the
// token's hash, so each delivery needs a new token.
func (x Secrets) deliver(ctx context.Context, s Session, g guestclient.Guest, all secrets, redact func(...secret.Value)) (Session, error) {
	token := ids.Hex(32)
	redact(secret.NewValue(token))
	sum := sha256.Sum256([]byte(token))
	_, err := x.Sessions.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
		row.TokenSHA256 = hex.EncodeToString(sum[:])
		return store.Event{}, nil
	})
	if err != nil {
		return s, err
	}
	var at gateway.Interception
	if s.Spec.Enforced {
		if at, err = x.Sessions.Gateway(s).SetSecrets(ctx, all.gateway()); err != nil {
			return s, err
		}
	}
	values := all.guest(at.Placeholders)
	s, err = x.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		f.Secrets, f.SecretsAt = guestclient.Measure(values, token), time.Now().UTC()
	})
	if err != nil {
		return s, err
	}
	if len(at.Certificate) > 0 {
		if err := g.Trust(ctx, at.Certificate); err != nil {
			return s, err
		}
	}
	if err := x.deliverLogins(ctx, s, g, all.logins, at.Placeholders); err != nil {
		return s, err
	}
	var names []string
	for _, l := range all.logins {
		names = append(names, l.Provider)
	}
	if !slices.Equal(names, s.Status.Logins) {
		if s, err = x.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Logins = names }); err != nil {
			return s, err
		}
	}
	return s, g.SetSecrets(ctx, values, token)
}

// warnings returns a text for each secret that stays on the host and has no value.
func (s secrets) warnings() []string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(s.failed)) {
		all = append(all, fmt.Sprintf("%v; requests with it are answered with 502", s.failed[name]))
	}
	return all
}
