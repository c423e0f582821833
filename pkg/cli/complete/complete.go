// Package complete has what the shells offer for arguments and flags.
package complete

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

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Completion only reads files and the store, and asks serve about other hosts of a cluster. It starts
// nothing, creates nothing and contacts no VM. If an error occurs, it offers nothing, because the user is in the middle
// of typing a line.

// CompletionTime limits the time of a completion. A prompt that hangs is worse than one
// without offers.
const CompletionTime = time.Second

// A Lister returns values, each optionally followed by "\t" and a description.
type Lister func(cmd *cobra.Command, args []string) []string

// Args completes positional arguments in order, and offers nothing after the last.
func Args(each ...Lister) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) >= len(each) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return each[len(args)](cmd, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// Many is like Args, but the last argument can be repeated with other
// values.
func Many(each ...Lister) cobra.CompletionFunc {
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

// Session completes one session.
func Session(a *app.App) cobra.CompletionFunc {
	return Args(Sessions(a))
}

// Repos completes one session, repository or path.
func Repos(a *app.App) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp // a new label
		}
		offer := Sessions(a)(cmd, args)
		repos, _ := app.Repos(a) // on error there are none to offer
		for _, r := range repos {
			if !slices.ContainsFunc(offer, func(o string) bool { return strings.HasPrefix(o, r+"\t") }) {
				offer = append(offer, r+"\tno session yet")
			}
		}
		return offer, cobra.ShellCompDirectiveDefault
	}
}

// FinishFlags sets the completion of every flag below cmd that takes a value. It looks the
// flag's name up in values, because a name means the same in every command. A flag that is
// not in values takes something that cannot be listed.
func FinishFlags(cmd *cobra.Command, values map[string]cobra.CompletionFunc) {
	for _, sub := range cmd.Commands() {
		FinishFlags(sub, values)
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

// FlagValues returns the completion of each flag that takes a value, by name.
func FlagValues(a *app.App) map[string]cobra.CompletionFunc {
	one := func(l Lister) cobra.CompletionFunc {
		return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return l(cmd, args), cobra.ShellCompDirectiveNoFileComp
		}
	}
	these := func(words ...string) cobra.CompletionFunc {
		return cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveKeepOrder)
	}
	return map[string]cobra.CompletionFunc{
		"profile": one(Profiles(a)),
		"repo":    one(repoKeys(a)),
		"image":   one(sourceImages(a)),
		"arch": these(
			vm.X8664+"\t64-bit x86 (also amd64)",
			vm.AArch64+"\t64-bit ARM (also arm64)",
		),
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
			return []string{"keeper\tthe log of the session's keeper", "setup\tthe output of the repository's setup", "devcontainer\tthe output of its start", "services\tthe output of their start", "gateway\tthe log of the session's gateway", "serial\tthe VM's console", "hostagent\tthe log of Lima's host agent"}
		}),
		"stop":    one(Sessions(a, session.Ready, session.Creating, session.Starting, session.Broken)),
		"destroy": one(Sessions(a)),
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
		"workspace":    one(Workspaces(a)),
		"size":         these("20GiB", "80GiB", "200GiB"),
		"memory":       these("2GiB", "4GiB", "8GiB", "16GiB", "32GiB"),
		"disk":         these("20GiB", "50GiB", "100GiB", "200GiB"),
		"max-size":     these("1GiB", "4GiB", "16GiB"),
		"unused-for":   these("30d", "90d", "365d"),
		"host-service": cobra.FixedCompletions([]string{"localhost:"}, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace),
		"max-refs":     cobra.NoFileCompletions,
		"scope":        these("read\tread only", "submit\talso submit, cancel and destroy tasks", "admin\talso run commands, use secrets and local paths"),
		"session":      one(openSessions(a)),
		"state":        one(func(*cobra.Command, []string) []string { return taskStates() }),
		"last":         cobra.NoFileCompletions,
		"format":       these("asciicast\tfor players", "text\twithout escape sequences"),
		"speed":        these("2", "5", "10"),
		"idle":         these("500ms", "2s", "10s"),
		"at":           cobra.NoFileCompletions,
		"limit":        cobra.NoFileCompletions,
		"output":       cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault),
		"by":           these("session", "repo", "task", "model", "day"),
		"since":        these("1d", "7d", "30d"),
		"money":        these("1 USD", "5 USD", "20 USD", "none\tno limit"),
		"tokens":       these("500k", "2M", "10M", "none\tno limit"),
		"task":         cobra.NoFileCompletions,
		"remove":       one(Checkpoints(a)),
		"number":       these("2", "3", "5"),
		"label":        cobra.NoFileCompletions,
		"on": one(func(cmd *cobra.Command, _ []string) []string {
			ctx, cancel := context.WithTimeout(ContextOf(cmd), CompletionTime)
			defer cancel()
			return append(app.ClusterHosts(ctx, a), app.AnyOf+"\tone with room")
		}),
		"host": one(func(cmd *cobra.Command, _ []string) []string {
			ctx, cancel := context.WithTimeout(ContextOf(cmd), CompletionTime)
			defer cancel()
			c, _ := app.Contexts() // on error there are none to offer
			return slices.Concat([]string{app.ThisHost}, slices.Sorted(maps.Keys(c.Contexts)), app.ClusterHosts(ctx, a))
		}),
	}
}

// InStore returns the sessions, or nil if there is no store.
func InStore(a *app.App, cmd *cobra.Command) []session.Session {
	m, all := ReadStore(a, cmd)
	if m == nil {
		return nil
	}
	return all
}

// ReadStore returns a manager and the sessions, or nil if no store exists.
func ReadStore(a *app.App, cmd *cobra.Command) (*session.Manager, []session.Session) {
	cfg, err := a.Settings()
	if err != nil {
		return nil, nil
	}
	if _, err := os.Stat(cfg.Paths.Store()); err != nil {
		return nil, nil // opening it would create it
	}
	ctx, cancel := context.WithTimeout(ContextOf(cmd), CompletionTime)
	defer cancel()
	m, err := a.PlainManager(ctx)
	if err != nil {
		return nil, nil
	}
	all, err := m.List(ctx)
	if err != nil {
		return nil, nil
	}
	return m, all
}

// ContextOf returns a command's context: in a completion, the root command has it.
func ContextOf(cmd *cobra.Command) context.Context {
	if ctx := cmd.Context(); ctx != nil {
		return ctx
	}
	return cmd.Root().Context()
}

// Sessions offers the sessions in one of the phases, or all sessions, by name and by
// repository. For a command that works on every host, it offers those of the other hosts of the
// cluster, too.
func Sessions(a *app.App, phases ...session.Phase) Lister {
	return func(cmd *cobra.Command, _ []string) []string {
		offer := completionValues(InStore(a, cmd), phases...)
		if cmd.Flags().Changed("host") || !app.OnAnyHost(cmd) {
			return offer
		}
		a.AnyHost, a.Chosen = true, "" // no flag chose it, but completion itself works on this host
		ctx, cancel := context.WithTimeout(ContextOf(cmd), CompletionTime)
		defer cancel()
		others := a.OtherSessions(ctx)
		for _, host := range slices.Sorted(maps.Keys(others)) {
			for _, s := range others[host] {
				if len(phases) == 0 || slices.Contains(phases, s.State) {
					offer = append(offer, fmt.Sprintf("%s:%s\t%s", host, s.Name, termtext.Line(string(s.State)+" "+s.DisplayName())))
				}
			}
		}
		return offer
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

// Checkpoints offers the complete checkpoints of the session that the first argument names.
func Checkpoints(a *app.App) Lister {
	return func(cmd *cobra.Command, args []string) (offer []string) {
		_, s, ok := First(a, cmd, args)
		if !ok {
			return nil
		}
		for _, c := range s.Checkpoints() {
			if c.State == session.CheckpointComplete {
				offer = append(offer, c.Name)
			}
		}
		return offer
	}
}

// Workspaces offers the workspaces.
func Workspaces(a *app.App) Lister {
	return func(cmd *cobra.Command, _ []string) (offer []string) {
		m, err := a.PlainManager(cmd.Context())
		if err != nil {
			return nil
		}
		all, _ := session.Workspaces{Sessions: m}.List()
		for _, ws := range all {
			offer = append(offer, fmt.Sprintf("%s\t%v", ws.Name, config.Size(ws.Size)))
		}
		return offer
	}
}

// Forkable offers the running sessions, and the complete checkpoints of all sessions after an "@".
func Forkable(a *app.App) Lister {
	return func(cmd *cobra.Command, _ []string) []string {
		all := InStore(a, cmd)
		offer := completionValues(all, session.Ready)
		for _, s := range all {
			for _, c := range s.Checkpoints() {
				if c.State == session.CheckpointComplete {
					offer = append(offer, s.Name+"@"+c.Name+"\tcheckpoint")
				}
			}
		}
		return offer
	}
}

// openSessions offers the sessions that do not belong to a task.
func openSessions(a *app.App) Lister {
	return func(cmd *cobra.Command, _ []string) []string {
		return completionValues(slices.DeleteFunc(InStore(a, cmd), func(s session.Session) bool { return s.Task != "" }))
	}
}

// Profiles offers the names of the profiles.
func Profiles(a *app.App) Lister {
	return func(*cobra.Command, []string) []string {
		cfg, err := a.Settings()
		if err != nil {
			return nil
		}
		return cfg.Profiles()
	}
}

// repoKeys offers the repositories that have settings or a session.
func repoKeys(a *app.App) Lister {
	return func(cmd *cobra.Command, _ []string) []string {
		found := map[string]string{}
		if cfg, err := a.Settings(); err == nil {
			for _, key := range cfg.Repos() {
				found[shortKey(string(key))] = "has its own settings"
			}
		}
		for _, s := range InStore(a, cmd) {
			key := shortKey(s.RepoKey)
			found[key] = cmp.Or(found[key], "has a session")
		}
		var offer []string
		for _, key := range slices.Sorted(maps.Keys(found)) {
			offer = append(offer, key+"\t"+found[key])
		}
		return offer
	}
}

// shortKey returns a key as users write it: owner/repo for github.com.
func shortKey(key string) string { return strings.TrimPrefix(key, "github.com/") }

// sourceImages offers the images that can be requested for a session.
func sourceImages(a *app.App) Lister {
	return func(*cobra.Command, []string) []string {
		offer := []string{image.Ubuntu + "\tthe cloud image of the VM template"}
		images, err := app.Images(a)
		if err != nil {
			return offer
		}
		built, err := images.Find(image.Debian, vm.HostArch())
		if err != nil {
			return append(offer, image.Debian+"\tnot built yet")
		}
		return append(offer, image.Debian+"\tbuilt "+console.Ago(built.CreatedAt)+" ago")
	}
}

// BuiltImages offers the images that are stored as local files.
func BuiltImages(a *app.App) Lister {
	return func(*cobra.Command, []string) []string {
		images, err := app.Images(a)
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
}

// Removable offers the images that can be removed, and the saved setups.
func Removable(a *app.App) Lister {
	images := BuiltImages(a)
	return func(cmd *cobra.Command, args []string) []string {
		offer := images(cmd, args)
		cfg, err := a.Settings()
		if err != nil {
			return offer
		}
		kept, _ := session.SavedSetups{Paths: cfg.Paths}.List()
		for _, b := range kept {
			offer = append(offer, fmt.Sprintf("%s\tsaved setup of %s, %v", b.VM, b.RepoKey, config.Size(b.Size)))
		}
		return offer
	}
}

// GroupNames lists the groups of names, each as @NAME and its size.
func GroupNames(a *app.App) []string {
	cfg, err := a.Settings()
	if err != nil {
		return nil
	}
	var offer []string
	groups := cfg.Groups()
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		offer = append(offer, fmt.Sprintf("@%s\t%s", name, Count(len(groups[name]), "name")))
	}
	return offer
}

// First returns the session that the first argument identifies.
func First(a *app.App, cmd *cobra.Command, args []string) (*session.Manager, session.Session, bool) {
	m, all := ReadStore(a, cmd)
	if m == nil || len(all) == 0 || len(args) == 0 {
		return nil, session.Session{}, false
	}
	ctx, cancel := context.WithTimeout(ContextOf(cmd), CompletionTime)
	defer cancel()
	h, err := a.Engine(m)
	if err != nil {
		return nil, session.Session{}, false
	}
	found, err := app.FindSession(ctx, h, args[0])
	if err != nil {
		return nil, session.Session{}, false
	}
	_, s, err := a.Local(ctx, h, found)
	return m, s, err == nil
}

// Count formats a number of things.
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func taskStates() (all []string) {
	for _, p := range task.Phases() {
		all = append(all, string(p))
	}
	return all
}
