package setupcmd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func NewConfigCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "config", Short: "Show and edit the settings",
		Long: `Show and edit the settings. All settings are optional. They are read in this order, and
later values override earlier ones: shipped defaults, /etc/agent-sessionizer, the user's
files, the repository's own file (which can only narrow the network), the environment,
flags.`,
		Example: `  agent-sessionizer config show --origin
  agent-sessionizer config edit`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var o configShowOptions
	show := &cobra.Command{
		Use: "show", Short: "Show the effective settings", Args: app.Usage(cobra.NoArgs),
		Example: `  agent-sessionizer config show
  agent-sessionizer config show --origin --repo owner/repo
  agent-sessionizer config show --json | jq .settings.resources`,
		RunE: func(cmd *cobra.Command, _ []string) error { return runConfigShow(a, o) },
	}
	o.flags(show, "print JSON")
	show.Flags().BoolVar(&o.origin, "origin", false, "show the origin of each value: file and line, variable or flag")
	var pathJSON bool
	path := &cobra.Command{
		Use: "path", Short: "Show the directories of settings, state and images", Args: app.Usage(cobra.NoArgs),
		Example: `  agent-sessionizer config path
  cd "$(agent-sessionizer config path --json | jq -r .settings)"`,
		RunE: func(cmd *cobra.Command, _ []string) error { return runConfigPath(a, pathJSON) },
	}
	path.Flags().BoolVar(&pathJSON, "json", false, "print a JSON object")
	init := &cobra.Command{
		Use: "init", Short: "Create editable copies of the shipped settings files", Args: app.Usage(cobra.NoArgs),
		Long: `Create editable copies of the shipped settings files in your settings directory. Files
that already exist are not changed.`,
		Example: `  agent-sessionizer config init`,
		RunE:    func(cmd *cobra.Command, _ []string) error { return runConfigInit(a) },
	}
	cmd.AddCommand(show, newConfigEditCmd(a), path, init)
	return cmd
}

type configShowOptions struct {
	settingsOptions
	origin bool
}

// configView is the JSON output of config show.
type configView struct {
	Image      string            `json:"image"`
	Prepare    config.Prepare    `json:"prepare"`
	Pool       int               `json:"pool"`
	Limits     config.Limits     `json:"limits"`
	Tasks      config.Tasks      `json:"tasks"`
	Cluster    config.Cluster    `json:"cluster,omitzero"`
	Log        config.Log        `json:"log"`
	Audit      config.Audit      `json:"audit"`
	Recordings config.Recordings `json:"recordings"`
	Attention  config.Attention  `json:"attention"`
	Editor     string            `json:"editor,omitempty"`
	Dotfiles   string            `json:"dotfiles,omitempty"`
	Roots      []string          `json:"roots,omitempty"`
	Settings   config.Settings   `json:"settings"`
	Files      []string          `json:"files"`
}

func runConfigShow(a *app.App, o configShowOptions) error {
	cfg, set, err := settingsFor(a, o.settingsOptions)
	if err != nil {
		return err
	}
	if o.origin {
		return runConfigOrigin(a, cfg, o)
	}
	v := configView{
		Image: cfg.Image, Prepare: cfg.Prepare, Pool: cfg.Pool, Limits: cfg.Limits, Tasks: cfg.Tasks, Cluster: cfg.Cluster, Log: cfg.Log, Audit: cfg.Audit, Recordings: cfg.Recordings, Attention: cfg.Attention,
		Editor: cfg.Editor, Dotfiles: cfg.Dotfiles, Roots: cfg.Roots, Settings: set, Files: append([]string{}, cfg.Files...),
	}
	if o.json {
		return a.Con.JSON(v)
	}
	text, err := config.Text(v)
	if err != nil {
		return err
	}
	a.Printf("%s", text)
	return nil
}

func runConfigOrigin(a *app.App, cfg *config.Config, o configShowOptions) error {
	key, err := app.RepoKey(o.repo)
	if err != nil {
		return err
	}
	values, err := cfg.Values(key, o.profile)
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(values)
	}
	var rows [][]string
	for _, v := range values {
		for _, line := range plainValue(v.Value) {
			rows = append(rows, []string{v.Key, line, v.Origin.String()})
		}
	}
	a.Con.Table([]string{"KEY", "VALUE", "ORIGIN"}, rows)
	return nil
}

// maxList is the maximum length of a list that is shown on one line.
const maxList = 60

// plainValue formats a setting on one line. A long list takes one line per item, so that it
// does not push the other columns off the screen.
func plainValue(v any) []string {
	list := reflect.ValueOf(v)
	if list.Kind() != reflect.Slice {
		return []string{fmt.Sprint(v)}
	}
	var items []string
	for i := range list.Len() {
		items = append(items, fmt.Sprint(list.Index(i)))
	}
	if line := strings.Join(items, ", "); len(line) <= maxList {
		return []string{line}
	}
	return items
}

// pathsView is the JSON output of config path.
type pathsView struct {
	Settings string `json:"settings"`
	System   string `json:"system"`
	State    string `json:"state"`
	Images   string `json:"images"`
	Mirrors  string `json:"mirrors"`
	LimaHome string `json:"lima_home"`
}

func runConfigPath(a *app.App, asJSON bool) error {
	cfg, err := a.Settings()
	if err != nil {
		return err
	}
	p := cfg.Paths
	v := pathsView{p.Config, p.System, p.State, p.Images(), p.Mirrors(), p.LimaHome}
	if asJSON {
		return a.Con.JSON(v)
	}
	a.Pairs([][2]string{
		{"settings", v.Settings},
		{"system", v.System},
		{"state", v.State},
		{"images", v.Images},
		{"mirrors", v.Mirrors},
		{"LIMA_HOME", v.LimaHome},
	})
	return nil
}

// groupsFolder is the directory of the name groups, below the settings directory.
const groupsFolder = "network-groups"

// settingsFiles are the files that config edit accepts, besides those of groups.
var settingsFiles = append(config.Files(), "repos.txt")

func runConfigInit(a *app.App) error {
	paths, err := config.DefaultPaths()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(paths.Config, 0o700); err != nil {
		return fail.New(fail.Host, "create settings directory: %w", err)
	}
	for _, name := range append(slices.Clone(settingsFiles), app.TemplateName) {
		text, err := app.ShippedText(name)
		if err != nil {
			return err
		}
		path := filepath.Join(paths.Config, name)
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if os.IsExist(err) {
			a.Con.Say("%s", path+" already exists, not changed")
			continue
		}
		if err != nil {
			return fail.New(fail.Host, "write settings: %w", err)
		}
		_, err = f.Write(text)
		if err := errors.Join(err, f.Close()); err != nil {
			return fail.New(fail.Host, "write %s: %w", path, err)
		}
		a.Con.Say("%s", "wrote "+path)
	}
	return nil
}
