package cli

import (
	"context"
	"embed"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

// settingsOptions say whose settings are asked for.
type settingsOptions struct {
	repo    string
	profile string
	json    bool
}

func (o *settingsOptions) flags(cmd *cobra.Command, asJSON string) {
	cmd.Flags().StringVar(&o.repo, "repo", "", "for the `REPOSITORY`: owner/repo, host/owner/repo, a git URL or a path")
	cmd.Flags().StringVar(&o.profile, "profile", "", "with the profile `NAME`")
	cmd.Flags().BoolVar(&o.json, "json", false, asJSON)
}

// settingsFor are the settings in force for what o names, and all of them.
func (a *app) settingsFor(o settingsOptions) (*config.Config, config.Settings, error) {
	cfg, err := a.settings()
	if err != nil {
		return nil, config.Settings{}, err
	}
	key, err := repoKey(o.repo)
	if err != nil {
		return nil, config.Settings{}, err
	}
	set, err := cfg.For(key, o.profile)
	return cfg, set, err
}

func newSecretsCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "secrets", Short: "Secrets' references: list and check them; values are never shown",
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var o settingsOptions
	list := &cobra.Command{
		Use: "list", Short: "The names and references a session would get", Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runSecrets(cmd.Context(), a, o, false) },
	}
	check := &cobra.Command{
		Use: "check", Short: "Resolve every reference and throw the values away", Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runSecrets(cmd.Context(), a, o, true) },
	}
	for _, c := range []*cobra.Command{list, check} {
		o.flags(c, "print an array")
	}
	cmd.AddCommand(list, check)
	return cmd
}

// secretView is a reference and, after a check, what came of it.
type secretView struct {
	Name      string `json:"name"`
	Reference string `json:"reference"`
	OK        *bool  `json:"ok,omitempty"`
	Error     string `json:"error,omitempty"`
	Warning   string `json:"warning,omitempty"`
	Hint      string `json:"hint,omitempty"`
}

func runSecrets(ctx context.Context, a *app, o settingsOptions, check bool) error {
	_, set, err := a.settingsFor(o)
	if err != nil {
		return err
	}
	self, err := self()
	if err != nil {
		return err
	}
	views := []secretView{}
	var bad error
	for _, name := range slices.Sorted(maps.Keys(set.Secrets)) {
		v := secretView{Name: name, Reference: set.Secrets[name]}
		ref, err := secret.ParseRef(name, v.Reference)
		if err == nil && check {
			var values map[string]secret.Value
			values, err = secret.ResolveInChild(ctx, self, []secret.Ref{ref})
			a.redact.Add(slices.Collect(maps.Values(values))...)
			v.Warning = strings.Join(secret.Warnings([]secret.Ref{ref}), "; ")
		}
		if err != nil {
			v.Error, v.Hint = err.Error(), fail.HintOf(err)
			bad = err
		}
		if check || err != nil {
			ok := err == nil
			v.OK = &ok
		}
		views = append(views, v)
	}
	if o.json {
		if err := a.con.JSON(views); err != nil {
			return err
		}
	} else {
		header, rows := []string{"NAME", "REFERENCE", "RESULT"}, [][]string{}
		for _, v := range views {
			result := ""
			switch {
			case v.Error != "":
				result = v.Error
			case v.OK != nil:
				result = "ok"
			}
			rows = append(rows, []string{v.Name, v.Reference, result})
		}
		a.con.Table(header, rows)
		for _, v := range views {
			if v.Warning != "" {
				a.con.Warn("%s", v.Warning)
			}
		}
	}
	if bad != nil {
		e := fail.New(fail.Secret, "not every secret can be had")
		e.Hint = fail.HintOf(bad)
		return e
	}
	return nil
}

// repoKey reads what --repo names: as the files do, or as open does.
func repoKey(what string) (config.RepoKey, error) {
	if key, ok := config.ParseRepoKey(what); ok || what == "" {
		return key, nil
	}
	cwd, err := os.Getwd()
	if err != nil {
		return "", fail.New(fail.Host, "the current directory: %w", err)
	}
	ref, err := repo.Parse(what, cwd)
	return config.RepoKey(ref.Key), err
}

// finding is one line of doctor.
type finding struct {
	Check  string `json:"check"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	Hint   string `json:"hint,omitempty"`

	tolerable bool // slow or inconvenient, not broken
}

func newDoctorCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check what this host has and lacks for sessions",
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runDoctor(cmd.Context(), a, asJSON) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array of findings")
	return cmd
}

func runDoctor(ctx context.Context, a *app, asJSON bool) error {
	var out []finding
	add := func(check, detail string, err error) {
		f := finding{Check: check, OK: err == nil, Detail: detail}
		if err != nil {
			f.Detail, f.Hint = err.Error(), fail.HintOf(err)
		}
		out = append(out, f)
	}
	cfg, err := a.settings()
	if err == nil {
		add("settings", strings.Join(append([]string{"shipped defaults"}, cfg.Files...), ", "), nil)
		_, err := a.manager(ctx)
		add("store", cfg.Paths.Store(), err)
		driver, err := a.driver(quietLog())
		add("vm driver", "Lima, in "+cfg.Paths.LimaHome, err)
		if err == nil {
			accel, err := driver.Accel(ctx)
			detail := accel.Name + " (probed in " + accel.Took.Round(100e3).String() + ")"
			if accel.Took == 0 {
				detail = accel.Name + " (known from an earlier probe)"
			}
			if err == nil && accel.Name == "tcg" {
				err = fail.New(fail.Host, "%s: guests are emulated, 10 to 30 times slower: %s", detail, accel.Reason).
					WithHint("%s", accel.Hint)
				add("acceleration", detail, err)
				out[len(out)-1].tolerable = true
			} else {
				add("acceleration", detail, err)
			}
			problems := driver.Check(ctx)
			for _, p := range problems {
				add("host", "", p)
			}
			if len(problems) == 0 {
				add("host", "everything for VMs is there", nil)
			}
		}
		images, err := a.images()
		if err == nil {
			img, err := images.Lookup(cfg.Image, session.Arch())
			add("image", cfg.Image+" at "+img.Location, err)
		}
		set, err := cfg.For("", "")
		if err == nil {
			_, err = cfg.Policy(set, config.Additions{}, nil)
		}
		tolerable := err == nil && !set.Network.Walled()
		if tolerable {
			err = fail.New(fail.Policy, "network.wall is false: root in the guest decides what it reaches, this host included").
				WithHint("agent-sessionizer config path # and take network.wall out")
		}
		add("network", "mode "+string(set.Network.Mode)+", enforced on this host", err)
		out[len(out)-1].tolerable = tolerable
	} else {
		add("settings", "", err)
	}
	add("tmux", "the local tmux is fit", tmux.Client{}.Check(ctx))
	if asJSON {
		if err := a.con.JSON(out); err != nil {
			return err
		}
	} else {
		for _, f := range out {
			mark := "✓"
			if !f.OK {
				mark = "✗"
			}
			a.printf("%s %-13s %s\n", mark, f.Check, console.Clean(f.Detail))
			if f.Hint != "" {
				a.printf("  %-13s hint: %s\n", "", f.Hint)
			}
		}
	}
	for _, f := range out {
		if !f.OK && !f.tolerable {
			return fail.New(fail.Host, "something is missing")
		}
	}
	return nil
}

func newConfigCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "config", Short: "Show the settings and where they come from",
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var o settingsOptions
	show := &cobra.Command{
		Use: "show", Short: "The settings in force", Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runConfigShow(a, o) },
	}
	o.flags(show, "print JSON")
	var pathJSON bool
	path := &cobra.Command{
		Use: "path", Short: "The directories", Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runConfigPath(a, pathJSON) },
	}
	path.Flags().BoolVar(&pathJSON, "json", false, "print an object")
	init := &cobra.Command{
		Use: "init", Short: "Write the shipped settings files, for editing; existing ones stay", Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runConfigInit(a) },
	}
	cmd.AddCommand(show, path, init)
	return cmd
}

// configView is what config show prints.
type configView struct {
	Image    string          `json:"image"`
	Prepare  config.Prepare  `json:"prepare"`
	Limits   config.Limits   `json:"limits"`
	Settings config.Settings `json:"settings"`
	Files    []string        `json:"files"`
}

func runConfigShow(a *app, o settingsOptions) error {
	cfg, set, err := a.settingsFor(o)
	if err != nil {
		return err
	}
	v := configView{Image: cfg.Image, Prepare: cfg.Prepare, Limits: cfg.Limits, Settings: set, Files: append([]string{}, cfg.Files...)}
	if o.json {
		return a.con.JSON(v)
	}
	text, err := config.Text(v)
	if err != nil {
		return err
	}
	a.printf("%s", text)
	return nil
}

// pathsView is what config path prints.
type pathsView struct {
	Settings string `json:"settings"`
	System   string `json:"system"`
	State    string `json:"state"`
	Images   string `json:"images"`
	Mirrors  string `json:"mirrors"`
	LimaHome string `json:"lima_home"`
}

func runConfigPath(a *app, asJSON bool) error {
	cfg, err := a.settings()
	if err != nil {
		return err
	}
	p := cfg.Paths
	v := pathsView{p.Config, p.System, p.State, p.Images(), p.Mirrors(), p.LimaHome}
	if asJSON {
		return a.con.JSON(v)
	}
	a.pairs([][2]string{
		{"settings", v.Settings},
		{"system", v.System},
		{"state", v.State},
		{"images", v.Images},
		{"mirrors", v.Mirrors},
		{"LIMA_HOME", v.LimaHome},
	})
	return nil
}

func runConfigInit(a *app) error {
	cfg, err := a.settings()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.Paths.Config, 0o700); err != nil {
		return fail.New(fail.Host, "make the settings directory: %w", err)
	}
	for _, file := range []struct {
		from embed.FS
		name string
	}{
		{sessionizer.Config, "config/config.yaml"},
		{sessionizer.Config, "config/resources.yaml"},
		{sessionizer.Config, "config/network-allowlist.txt"},
		{sessionizer.Config, "config/repos.txt"},
		{sessionizer.Lima, "lima/" + templateName},
	} {
		text, err := file.from.ReadFile(file.name)
		if err != nil {
			return err
		}
		path := filepath.Join(cfg.Paths.Config, filepath.Base(file.name))
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if os.IsExist(err) {
			a.con.Say("%s", path+" is there already and stays")
			continue
		}
		if err != nil {
			return fail.New(fail.Host, "write the settings: %w", err)
		}
		_, err = f.Write(text)
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return fail.New(fail.Host, "write %s: %w", path, err)
		}
		a.con.Say("%s", "wrote "+path)
	}
	return nil
}
