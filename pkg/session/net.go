package session

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Net is what sessions may reach.
type Net struct{ Sessions *Manager }

// settings reads the settings again at every start, so that a changed file takes
// effect. What was fixed when the session was created, such as its resources, is not
// among them.
func (net Net) settings(s Session) (config.Settings, error) {
	set, err := net.Sessions.Config.For(config.RepoKey(s.RepoKey), s.Spec.Profile)
	if err != nil {
		return set, err
	}
	if s.Spec.NetworkMode != "" {
		set.Network.Mode = config.Mode(s.Spec.NetworkMode)
	}
	set.Secrets = withSecrets(set.Secrets, s.Spec.Secrets)
	return set, nil
}

// withSecrets merges the settings' references with the session's own, which take
// precedence.
func withSecrets(settings, own map[string]config.Secret) map[string]config.Secret {
	if len(own) == 0 {
		return settings
	}
	all := make(map[string]config.Secret, len(settings)+len(own))
	maps.Copy(all, settings)
	maps.Copy(all, own)
	return all
}

// Policy compiles the network policy of a session.
func (net Net) Policy(ctx context.Context, s Session) (*policy.Policy, error) {
	set, err := net.settings(s)
	if err != nil {
		return nil, err
	}
	own := s.Status.Net
	if err := net.addDenied(ctx, s, &own); err != nil {
		return nil, err
	}
	own.HostServices = slices.Concat(s.Spec.HostServices, own.HostServices)
	own.Layer = s.Spec.Requests
	p, err := net.Sessions.Config.Policy(set, own, s.Status.Project)
	if err != nil {
		return nil, err
	}
	if s.Spec.Within != nil {
		p = policy.Tighten(p, s.Spec.Within.Policy)
	}
	p.Enforced = s.Spec.Enforced // fixed when the session was created; later settings do not change it
	return p, nil
}

// addDenied adds what was denied to the sessions above a subtask's since it was submitted.
func (net Net) addDenied(ctx context.Context, s Session, to *config.Additions) error {
	if s.Spec.Within == nil {
		return nil
	}
	for _, id := range s.Spec.Within.Sessions {
		above, err := net.Sessions.Get(ctx, id)
		if fail.CodeOf(err) == fail.NotFound {
			continue
		}
		if err != nil {
			return err
		}
		to.Deny = addRules(to.Deny, above.Status.Net.Deny)
		for _, r := range above.Status.Net.Requests {
			if len(r.Deny) > 0 {
				to.Requests = append(slices.Clone(to.Requests), r)
			}
		}
	}
	return nil
}

// applyBelow applies the policies of the sessions of subtasks below a session, of all at the
// same time: each guest takes as long as it likes. A guest that is not ready yet keeps the policy
// with which it was set up, but its gateway does not.
func (net Net) applyBelow(ctx context.Context, s Session) error {
	all, err := net.Sessions.List(ctx)
	errs := make([]error, len(all))
	var below sync.WaitGroup
	for i, b := range all {
		if w := b.Spec.Within; w == nil || !slices.Contains(w.Sessions, s.ID) {
			continue
		}
		below.Go(func() {
			switch b.Phase {
			case Ready:
				errs[i] = net.ApplyPolicy(ctx, b)
			case Creating, Starting:
				if net.Sessions.Gateway(b).Running() { // otherwise it will start with the new policy
					_, errs[i] = net.enforce(ctx, b)
				}
			}
		})
	}
	below.Wait()
	return errors.Join(append(errs, err)...)
}

// Allow adds names, or @groups of them, to what the session may reach. If the session
// runs, it takes effect immediately. It revokes what Deny recorded for these names.
func (net Net) Allow(ctx context.Context, s Session, entries []string) (Session, error) {
	rules, requests, err := net.rules(entries, "net allow")
	if err != nil {
		return s, err
	}
	return net.changeNet(ctx, s, NetChange{Allow: strings.Join(entries, " ")}, func(n *config.Additions) {
		n.Allow, n.Deny = addRules(n.Allow, rules), removeRules(n.Deny, rules)
		for _, r := range requests {
			n.Requests = append(withoutRequest(n.Requests, r), policy.RequestRules{Host: r.host, Except: []string{r.rule}, Source: "net allow"})
		}
	})
}

// Deny removes names from what the session and its subtasks may reach, whatever allows them. It
// takes effect immediately for those that run.
func (net Net) Deny(ctx context.Context, s Session, entries []string) (Session, error) {
	rules, requests, err := net.rules(entries, "net deny")
	if err != nil {
		return s, err
	}
	s, err = net.changeNet(ctx, s, NetChange{Deny: strings.Join(entries, " ")}, func(n *config.Additions) {
		n.Allow, n.Deny = removeRules(n.Allow, rules), addRules(n.Deny, rules)
		for _, r := range requests {
			n.Requests = append(withoutRequest(n.Requests, r), policy.RequestRules{Host: r.host, Deny: []string{r.rule}, Source: "net deny"})
		}
	})
	return s, errors.Join(err, net.applyBelow(ctx, s))
}

// OpenHostServices lets an existing session reach services of the host and its
// network. If the session runs, it takes effect immediately.
func (net Net) OpenHostServices(ctx context.Context, s Session, services []netip.AddrPort) (Session, error) {
	var added []string
	for _, service := range services {
		if !slices.Contains(slices.Concat(s.Spec.HostServices, s.Status.Net.HostServices), service) {
			added = append(added, service.String())
		}
	}
	if len(added) == 0 {
		return s, nil
	}
	return net.changeNet(ctx, s, NetChange{HostServices: strings.Join(added, " ")}, func(n *config.Additions) {
		for _, service := range services {
			if !slices.Contains(n.HostServices, service) {
				n.HostServices = append(n.HostServices, service)
			}
		}
	})
}

// requestRule is a rule for requests to a host.
type requestRule struct{ host, rule string }

// rules parses names, @groups and requests.
func (net Net) rules(entries []string, source string) (rules []policy.Rule, requests []requestRule, err error) {
	for _, e := range entries {
		if policy.IsRequest(e) {
			var r requestRule
			if r.host, r.rule, err = policy.ParseRequestTarget(e); err != nil {
				return nil, nil, fail.New(fail.Usage, "request %w", err)
			}
			requests = append(requests, r)
			continue
		}
		found, err := net.Sessions.Config.Groups().Expand(e, source)
		if err != nil {
			return nil, nil, fail.New(fail.Usage, "%w", err)
		}
		rules = append(rules, found...)
	}
	return rules, requests, nil
}

// withoutRequest removes the earlier rule for a request.
func withoutRequest(all []policy.RequestRules, r requestRule) []policy.RequestRules {
	return slices.DeleteFunc(slices.Clone(all), func(o policy.RequestRules) bool {
		return o.Host == r.host && slices.Contains(slices.Concat(o.Except, o.Deny), r.rule)
	})
}

func sameRule(a, b policy.Rule) bool {
	return a.Pattern == b.Pattern && slices.Equal(a.Ports, b.Ports)
}

func addRules(rules, more []policy.Rule) []policy.Rule {
	return append(removeRules(rules, more), more...)
}

func removeRules(rules, less []policy.Rule) []policy.Rule {
	return slices.DeleteFunc(slices.Clone(rules), func(r policy.Rule) bool {
		return slices.ContainsFunc(less, func(l policy.Rule) bool { return sameRule(r, l) })
	})
}

// changeNet changes the rules of this session only. The change is written before it
// is in force, and in force before changeNet returns.
func (net Net) changeNet(ctx context.Context, s Session, change NetChange, f func(*config.Additions)) (Session, error) {
	changed := s
	f(&changed.Status.Net)
	if _, err := net.Policy(ctx, changed); err != nil { // for example too many rules; nothing is stored
		return s, err
	}
	if reflect.DeepEqual(changed.Status.Net, s.Status.Net) && s.Phase == Ready { // a repeated change
		return s, net.ApplyPolicy(ctx, s)
	}
	s, err := net.Sessions.updateStatus(ctx, s.ID, store.NewEvent(EventNet, change), func(status *Status) { f(&status.Net) })
	if err != nil || s.Phase != Ready {
		return s, err
	}
	return s, net.ApplyPolicy(ctx, s)
}

// enforce brings the policy of a session's gateway, if it has one, up to date with the settings.
func (net Net) enforce(ctx context.Context, s Session) (*policy.Policy, error) {
	p, err := net.Policy(ctx, s)
	if err != nil || !s.Spec.Enforced {
		return p, err
	}
	g, err := net.gateway(ctx, s)
	if err != nil {
		return p, err
	}
	if err := Secrets(net).restrict(ctx, s, g); err != nil {
		return p, err
	}
	if err := g.SetPolicy(ctx, p); err != nil {
		code := fail.CodeOf(err)
		if errors.Is(err, gateway.ErrNotRunning) {
			code = fail.Conflict // like a session that is not running
		}
		return p, fail.New(code, "%w", err).WithHint("agent-sessionizer start %s", s.Name)
	}
	return p, nil
}

// guestPolicyTime is how long a guest may take to apply a policy.
const guestPolicyTime = time.Minute

// ApplyPolicy brings a running session's policy up to date with the settings. It
// updates the gateway first, whose policy is enforced, and then the guest's, which
// must not be stricter.
func (net Net) ApplyPolicy(ctx context.Context, s Session) error {
	p, err := net.enforce(ctx, s)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, guestPolicyTime, fail.New(fail.Timeout, "the guest of session %s did not apply its policy within %v", s.Name, guestPolicyTime).
		WithHint("agent-sessionizer net reload %s", s.Name))
	defer cancel()
	conn, err := Connections{Paths: net.Sessions.Config.Paths}.Dial(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	if s.Spec.Enforced {
		x, err := net.Sessions.Gateway(s).Interception(ctx)
		if err != nil {
			return err
		}
		if len(x.Certificate) > 0 {
			if err := s.Guest(conn).Trust(ctx, x.Certificate); err != nil {
				return err
			}
		}
	}
	_, err = s.Guest(conn).SetPolicy(ctx, p)
	if _, ok := errors.AsType[*ssh.ExitError](err); ok {
		return fail.New(fail.Conflict, "the guest of session %s did not apply its policy: %w", s.Name, err).
			WithHint("agent-sessionizer stop %s, and then: agent-sessionizer start %s", s.Name, s.Name)
	}
	return err
}

// DeniedSince counts what the gateway has denied since the given time, by target.
func (net Net) DeniedSince(ctx context.Context, s Session, since time.Time) ([]gateway.Denial, error) {
	if !s.Spec.Enforced {
		return nil, nil
	}
	return gateway.Denials(ctx, net.Sessions.Gateway(s).Dir, since)
}
