package app

import (
	"cmp"
	"context"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/client"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// HostVariable is the environment variable that chooses the host, like --host.
const HostVariable = "AGENT_SESSIONIZER_HOST"

// ThisHost is the context of this host.
const ThisHost = "local"

// lookUp returns the context of a name or a URL. This host has the empty one. The name may also be
// that of a host of the cluster.
func lookUp(p config.Paths, c config.Contexts, name string) (config.Context, error) {
	if name == "" || name == ThisHost {
		return config.Context{}, nil
	}
	if host, ok := strings.CutPrefix(name, clusterScheme); ok {
		return clusterContext(p, host)
	}
	if strings.Contains(name, "://") {
		return config.Context{URL: name, Token: "env:AGENT_SESSIONIZER_TOKEN"}, nil
	}
	found, ok := c.Contexts[name]
	if ok {
		return found, nil
	}
	if of, err := clusterContext(p, name); err == nil {
		return of, nil
	}
	return found, NoContext(c, name)
}

// NoContext returns the error for an unknown context.
func NoContext(c config.Contexts, name string) error {
	known := append([]string{ThisHost}, slices.Sorted(maps.Keys(c.Contexts))...)
	return fail.New(fail.NotFound, "no context %q; there are %s", name, strings.Join(known, ", ")).
		WithHint("agent-sessionizer context add NAME URL")
}

// HostName returns the host that the command works on, as --host takes it.
func HostName(a *App, c config.Contexts) string {
	return cmp.Or(a.Chosen, os.Getenv(HostVariable), c.Current, ThisHost)
}

// Context returns the other host that the command works on, or the empty context for this
// host.
func Context(a *App) (config.Context, error) {
	c, err := Contexts()
	if err != nil {
		return config.Context{}, err
	}
	paths, err := config.DefaultPaths()
	if err != nil {
		return config.Context{}, err
	}
	return lookUp(paths, c, HostName(a, c))
}

// HostOf returns the host that a command found, as --host takes it.
func HostOf(a *App, h ops.Host, c config.Contexts) string {
	if other, ok := h.(otherHost); ok {
		return clusterScheme + other.name
	}
	return HostName(a, c)
}

// NameOn returns the name of a session that a command found, as commands take it.
func NameOn(h ops.Host, name string) string {
	if other, ok := h.(otherHost); ok {
		return other.name + ":" + name
	}
	return name
}

// anyHost lists the commands that work on every host. The others work only on this one, and
// refuse another, so that it is never changed instead of it.
var anyHost = []string{
	"", "open", "list", "status", "next", "last", "answer", "usage", "budget", "mcp", "start", "stop", "destroy", "logs", "exec", "ssh", "cp", "code", "diff", "fetch",
	"picker", "recordings", "net", "ports", "task", "secrets", "image list", "context", "completion", "man", "version", "help", "attach-session",
}

// OnAnyHost reports whether a command works on every host.
func OnAnyHost(cmd *cobra.Command) bool {
	_, name, _ := strings.Cut(cmd.CommandPath(), " ")
	return slices.ContainsFunc(anyHost, func(any string) bool { return name == any || any != "" && strings.HasPrefix(name, any+" ") })
}

// Contexts returns the user's contexts.
func Contexts() (config.Contexts, error) {
	paths, err := config.DefaultPaths()
	if err != nil {
		return config.Contexts{}, err
	}
	return config.ReadContexts(paths)
}

// remote returns the other host that the command works on, or nil for this host.
func (a *App) remote(ctx context.Context) (ops.Host, error) {
	to, err := Context(a)
	if err != nil || to.URL == "" {
		return nil, err
	}
	if name, ok := strings.CutPrefix(to.URL, clusterScheme); ok {
		paths, err := config.DefaultPaths()
		if err != nil {
			return nil, err
		}
		return newOtherHost(paths, name)
	}
	target := client.Target{URL: to.URL}
	if strings.HasPrefix(to.URL, "http") {
		if target.Token, err = token(ctx, a, to); err != nil {
			return nil, err
		}
	}
	return client.New(target)
}

// token resolves the token of a context.
func token(ctx context.Context, a *App, to config.Context) (string, error) {
	self, err := Self()
	if err != nil {
		return "", err
	}
	ref, err := secret.ParseRef("AGENT_SESSIONIZER_TOKEN", to.Token)
	if err != nil {
		return "", err
	}
	values, err := secret.ResolveInChild(ctx, self, []secret.Ref{ref})
	if err != nil {
		return "", err
	}
	value := values[ref.Name]
	a.Redact.Add(value)
	return value.Reveal(), nil
}
