package cli

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// Completion only reads files and the store. It starts nothing, creates nothing and
// contacts no VM. If an error occurs, it offers nothing, because the user is in the middle
// of typing a line.

// completionTime limits the time of a completion. A prompt that hangs is worse than one
// without offers.
const completionTime = time.Second

// A lister returns values, each optionally followed by "\t" and a description.
type lister func(cmd *cobra.Command, args []string) []string

// completeArgs completes positional arguments in order, and offers nothing after the last.
func (a *app) completeArgs(each ...lister) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) >= len(each) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return each[len(args)](cmd, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeMany is like completeArgs, but the last argument can be repeated with other
// values.
func (a *app) completeMany(each ...lister) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		var left []string
		for _, v := range each[min(len(args), len(each)-1)](cmd, args) {
			if value, _, _ := strings.Cut(v, "\t"); !slices.Contains(args, value) {
				left = append(left, v)
			}
		}
		return left, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeSessions completes one session.
func (a *app) completeSessions(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	return a.completeArgs(a.sessions())(cmd, args, typed)
}

// completeRepos completes one session, repository or path.
func (a *app) completeRepos(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	offer := a.sessions()(cmd, args)
	repos, _ := a.repos() // on error there are none to offer
	for _, r := range repos {
		if !slices.ContainsFunc(offer, func(o string) bool { return strings.HasPrefix(o, r+"\t") }) {
			offer = append(offer, r+"\tno session yet")
		}
	}
	return offer, cobra.ShellCompDirectiveDefault
}

// completeCopy completes a local path, or SESSION: followed by a path in its guest.
func (a *app) completeCopy(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 1 || strings.Contains(typed, ":") {
		return nil, cobra.ShellCompDirectiveNoFileComp // only the guest knows its files
	}
	if _, _, inGuest := guestPath(append(args, "")[0]); inGuest || strings.ContainsAny(typed, "./") {
		return nil, cobra.ShellCompDirectiveDefault
	}
	var offer []string
	for _, s := range a.inStore(cmd) {
		if strings.HasPrefix(s.Name, typed) {
			offer = append(offer, s.Name+":\t"+string(s.Phase)+" "+s.DisplayName())
		}
	}
	if len(offer) == 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return offer, cobra.ShellCompDirectiveNoSpace
}

// finishFlags sets the completion of every flag below cmd that takes a value. It looks the
// flag's name up in values, because a name means the same in every command. A flag that is
// not in values takes something that cannot be listed.
func finishFlags(cmd *cobra.Command, values map[string]cobra.CompletionFunc) {
	for _, sub := range cmd.Commands() {
		finishFlags(sub, values)
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.DefValue == config.Size(0).String() { // help would show it as the default
			f.DefValue = ""
		}
		if _, has := cmd.GetFlagCompletionFunc(f.Name); has || f.NoOptDefVal != "" {
			return
		}
		complete, ok := values[f.Name]
		if !ok {
			complete = cobra.NoFileCompletions
		}
		// Registration fails only for a missing flag or one that already has a completion.
		_ = cmd.RegisterFlagCompletionFunc(f.Name, complete)
	})
}

func (a *app) flagValues() map[string]cobra.CompletionFunc {
	one := func(l lister) cobra.CompletionFunc {
		return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return l(cmd, args), cobra.ShellCompDirectiveNoFileComp
		}
	}
	these := func(words ...string) cobra.CompletionFunc {
		return cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveKeepOrder)
	}
	return map[string]cobra.CompletionFunc{
		"profile": one(a.profileNames),
		"repo":    one(a.repoKeys),
		"image":   one(a.sourceImages),
		"network": these(
			string(policy.Isolated)+"\tno network",
			string(policy.Allowlist)+"\tonly listed names",
			string(policy.Open)+"\tthe internet, but not the LAN",
		),
		"prepare": these(
			string(config.PrepareNone)+"\tsessions boot the image",
			string(config.PrepareGolden)+"\tsessions clone a provisioned disk",
			string(config.PrepareWarm)+"\tsessions resume a saved VM",
			string(config.PreparePool)+"\tsessions get a standby VM",
		),
		"from":  these(image.Debian+"\tbuilt from Debian packages", image.Ubuntu+"\tthe cloud image of the VM template"),
		"suite": these(image.DefaultSuite),
		"of": one(func(cmd *cobra.Command, _ []string) []string {
			if cmd.Parent().Name() == "task" {
				return []string{"stdout\tthe agent's standard output", "stderr\tthe agent's standard error", "events\tthe task's events", "keeper\tthe log of the task's keeper"}
			}
			return []string{"keeper\tthe log of the session's keeper", "serial\tthe VM's console", "hostagent\tthe log of Lima's host agent"}
		}),
		"stop":    one(a.sessions(session.Ready, session.Creating, session.Starting, session.Broken)),
		"destroy": one(a.sessions()),
		"into": func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		"cpus": one(func(*cobra.Command, []string) []string {
			var counts []string
			for n := 1; n <= runtime.NumCPU(); n *= 2 {
				counts = append(counts, strconv.Itoa(n))
			}
			return counts
		}),
		"memory":       these("2GiB", "4GiB", "8GiB", "16GiB", "32GiB"),
		"disk":         these("20GiB", "50GiB", "100GiB", "200GiB"),
		"max-size":     these("1GiB", "4GiB", "16GiB"),
		"unused-for":   these("30d", "90d", "365d"),
		"host-service": cobra.FixedCompletions([]string{"localhost:"}, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace),
		"max-refs":     cobra.NoFileCompletions,
		"scope":        these("read\tread only", "submit\talso submit, cancel and destroy tasks", "admin\talso run commands, use secrets and local paths"),
		"session":      one(a.openSessions),
		"state":        one(func(*cobra.Command, []string) []string { return taskStates() }),
		"last":         cobra.NoFileCompletions,
	}
}

// inStore returns the sessions, or nil if there is no store.
func (a *app) inStore(cmd *cobra.Command) []session.Session {
	m, all := a.readStore(cmd)
	if m == nil {
		return nil
	}
	return all
}

// readStore returns a manager and the sessions, or nil if no store exists.
func (a *app) readStore(cmd *cobra.Command) (*session.Manager, []session.Session) {
	cfg, err := a.settings()
	if err != nil {
		return nil, nil
	}
	if _, err := os.Stat(cfg.Paths.Store()); err != nil {
		return nil, nil // opening it would create it
	}
	ctx, cancel := context.WithTimeout(contextOf(cmd), completionTime)
	defer cancel()
	m, err := a.plainManager(ctx)
	if err != nil {
		return nil, nil
	}
	all, err := m.List(ctx)
	if err != nil {
		return nil, nil
	}
	return m, all
}

func contextOf(cmd *cobra.Command) context.Context {
	if ctx := cmd.Context(); ctx != nil {
		return ctx
	}
	return cmd.Root().Context()
}

// sessions offers the sessions in one of the phases, or all sessions, by name and by
// repository.
func (a *app) sessions(phases ...session.Phase) lister {
	return func(cmd *cobra.Command, _ []string) []string {
		return completionValues(a.inStore(cmd), phases...)
	}
}

func completionValues(all []session.Session, phases ...session.Phase) (offer []string) {
	called := map[string]int{}
	for _, s := range all {
		called[s.DisplayName()]++
	}
	for _, s := range all {
		if len(phases) > 0 && !slices.Contains(phases, s.Phase) {
			continue
		}
		if called[s.DisplayName()] == 1 {
			offer = append(offer, s.DisplayName()+"\t"+string(s.Phase))
		}
		offer = append(offer, s.Name+"\t"+string(s.Phase)+" "+s.DisplayName())
	}
	return offer
}

// openSessions offers the sessions that do not belong to a task.
func (a *app) openSessions(cmd *cobra.Command, _ []string) []string {
	return completionValues(slices.DeleteFunc(a.inStore(cmd), func(s session.Session) bool { return s.Task != "" }))
}

func (a *app) profileNames(*cobra.Command, []string) []string {
	cfg, err := a.settings()
	if err != nil {
		return nil
	}
	return cfg.Profiles()
}

// repoKeys offers the repositories that have settings or a session.
func (a *app) repoKeys(cmd *cobra.Command, _ []string) []string {
	found := map[string]string{}
	if cfg, err := a.settings(); err == nil {
		for _, key := range cfg.Repos() {
			found[shortKey(string(key))] = "has its own settings"
		}
	}
	for _, s := range a.inStore(cmd) {
		key := shortKey(s.RepoKey)
		found[key] = cmp.Or(found[key], "has a session")
	}
	var offer []string
	for _, key := range slices.Sorted(maps.Keys(found)) {
		offer = append(offer, key+"\t"+found[key])
	}
	return offer
}

// shortKey returns a key as users write it: owner/repo for github.com.
func shortKey(key string) string { return strings.TrimPrefix(key, "github.com/") }

// sourceImages offers the images that can be requested for a session.
func (a *app) sourceImages(*cobra.Command, []string) []string {
	offer := []string{image.Ubuntu + "\tthe cloud image of the VM template"}
	images, err := a.images()
	if err != nil {
		return offer
	}
	built, err := images.Find(image.Debian, session.Arch())
	if err != nil {
		return append(offer, image.Debian+"\tnot built yet")
	}
	return append(offer, image.Debian+"\tbuilt "+console.Ago(built.CreatedAt)+" ago")
}

// builtImages offers the images that are stored as local files.
func (a *app) builtImages(*cobra.Command, []string) []string {
	images, err := a.images()
	if err != nil {
		return nil
	}
	all, err := images.List()
	if err != nil {
		return nil
	}
	var offer []string
	for _, i := range all {
		if i.Path != "" && i.Ready {
			offer = append(offer, fmt.Sprintf("%s\t%v, created %s ago", i.Name, config.Size(i.Size), console.Ago(i.CreatedAt)))
		}
	}
	return offer
}

// deniedNames offers the names that the session's gateway denied, and the groups.
func (a *app) deniedNames(cmd *cobra.Command, args []string) []string {
	return append(a.recentlyDenied(cmd, args, func(e gateway.Entry) bool { return !e.Allowed }, "denied"), a.groupNames()...)
}

// allowedNames offers the names that the session's gateway allowed, and the groups.
func (a *app) allowedNames(cmd *cobra.Command, args []string) []string {
	return append(a.recentlyDenied(cmd, args, func(e gateway.Entry) bool { return e.Allowed }, "allowed"), a.groupNames()...)
}

// recentlyDeniedNames offers all names that the session asked for.
func (a *app) recentlyDeniedNames(cmd *cobra.Command, args []string) []string {
	return a.recentlyDenied(cmd, args, func(gateway.Entry) bool { return true }, "requested")
}

// recentlyDenied returns names from a session's decision log, the latest first. The guest chooses
// these names, so only valid ones are offered to a shell.
func (a *app) recentlyDenied(cmd *cobra.Command, args []string, match func(gateway.Entry) bool, what string) []string {
	m, s, ok := a.first(cmd, args)
	if !ok || !s.Spec.Enforced {
		return nil
	}
	ctx, cancel := context.WithTimeout(contextOf(cmd), completionTime)
	defer cancel()
	var names []string
	last := map[string]int{}
	for e, err := range gateway.Decisions(ctx, m.Gateway(s).Dir, false) {
		if err != nil || ctx.Err() != nil {
			break
		}
		name, err := policy.Canonical(e.Name)
		if err != nil || !match(e) {
			continue
		}
		if e.Kind != gateway.KindDNS && e.Port != 0 && e.Port != 443 {
			name += ":" + strconv.Itoa(int(e.Port))
		}
		if _, seen := last[name]; !seen {
			names = append(names, name)
		}
		last[name] = int(e.Seq)
	}
	slices.SortFunc(names, func(x, y string) int { return last[y] - last[x] })
	for i, name := range names {
		names[i] = name + "\t" + what
	}
	return names
}

func (a *app) groupNames() []string {
	cfg, err := a.settings()
	if err != nil {
		return nil
	}
	var offer []string
	groups := cfg.Groups()
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		offer = append(offer, fmt.Sprintf("@%s\t%s", name, count(len(groups[name]), "name")))
	}
	return offer
}

// publishedPorts offers the published ports for --close.
func (a *app) publishedPorts(cmd *cobra.Command, args []string) []string {
	_, s, ok := a.first(cmd, args)
	if taking, _ := cmd.Flags().GetBool("close"); !ok || !taking {
		return nil // only the guest knows which other ports are listened on
	}
	var offer []string
	for _, p := range s.Status.Ports {
		offer = append(offer, strconv.Itoa(int(p.Guest)))
	}
	return offer
}

// first returns the session that the first argument identifies.
func (a *app) first(cmd *cobra.Command, args []string) (*session.Manager, session.Session, bool) {
	m, all := a.readStore(cmd)
	if m == nil || len(all) == 0 || len(args) == 0 {
		return nil, session.Session{}, false
	}
	ctx, cancel := context.WithTimeout(contextOf(cmd), completionTime)
	defer cancel()
	h, err := a.engine(m)
	if err != nil {
		return nil, session.Session{}, false
	}
	found, err := findSession(ctx, h, args[0])
	if err != nil {
		return nil, session.Session{}, false
	}
	_, s, err := a.local(ctx, h, found)
	return m, s, err == nil
}

// count formats a number of things.
func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
