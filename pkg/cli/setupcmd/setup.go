// Package setupcmd has the commands for settings, contexts, secrets and the host.
package setupcmd

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// settingsOptions select the repository and profile whose settings are shown.
type settingsOptions struct {
	repo    string
	profile string
	json    bool
}

func (o *settingsOptions) flags(cmd *cobra.Command, asJSON string) {
	cmd.Flags().StringVar(&o.repo, "repo", "", "`REPOSITORY` of the session: owner/repo, host/owner/repo, a git URL or a path")
	cmd.Flags().StringVar(&o.profile, "profile", "", "profile `NAME` of the session")
	cmd.Flags().BoolVar(&o.json, "json", false, asJSON)
}

// settingsFor returns the configuration and the settings that apply to the selection.
func settingsFor(a *app.App, o settingsOptions) (*config.Config, config.Settings, error) {
	cfg, err := a.Settings()
	if err != nil {
		return nil, config.Settings{}, err
	}
	key, err := app.RepoKey(o.repo)
	if err != nil {
		return nil, config.Settings{}, err
	}
	set, err := cfg.For(key, o.profile)
	return cfg, set, err
}

func NewSecretsCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "secrets", Short: "List and check references to secrets",
		Long: `List and check references to secrets, and where their values may go. The values are never
shown.`,
		Example: `  agent-sessionizer secrets list
  agent-sessionizer secrets check --repo owner/repo`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var o settingsOptions
	list := &cobra.Command{
		Use: "list", Short: "List the names and references that a session would get", Args: app.Usage(cobra.NoArgs),
		Example: `  agent-sessionizer secrets list --repo owner/repo --profile work`,
		RunE:    func(cmd *cobra.Command, _ []string) error { return runSecrets(cmd.Context(), a, o, ops.ListSecrets) },
	}
	check := &cobra.Command{
		Use: "check", Short: "Resolve every reference and discard the values", Args: app.Usage(cobra.NoArgs),
		Example: `  agent-sessionizer secrets check`,
		RunE:    func(cmd *cobra.Command, _ []string) error { return runSecrets(cmd.Context(), a, o, ops.CheckSecrets) },
	}
	for _, c := range []*cobra.Command{list, check} {
		o.flags(c, "print a JSON array")
	}
	refresh := &cobra.Command{
		Use: "refresh SESSION", Short: "Resolve the secrets of a running session again",
		Long: `Resolve the secrets of a running session again, for example after a token was replaced.
Requests use the new values immediately. Programs in the guest keep their environment, and
new shells get the new value of a secret that is in the guest.`,
		Example: `  agent-sessionizer secrets refresh repo`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(complete.Sessions(a, session.Ready)),
		RunE: func(cmd *cobra.Command, args []string) error {
			h, s, err := app.Running(cmd.Context(), a, args[0])
			if err != nil {
				return err
			}
			now, err := ops.RefreshSecrets.On(cmd.Context(), h, ops.SessionPath{ID: s.ID})
			for _, text := range now.Warnings {
				a.Con.Warn("%s", text)
			}
			return err
		},
	}
	cmd.AddCommand(list, check, refresh)
	return cmd
}

func runSecrets(ctx context.Context, a *app.App, o settingsOptions, op ops.Operation[ops.SecretQuery, ops.SecretList]) error {
	key, err := app.RepoKey(o.repo)
	if err != nil {
		return err
	}
	h, err := a.QuietHost(ctx)
	if err != nil {
		return err
	}
	list, err := op.On(ctx, h, ops.SecretQuery{Repo: string(key), Profile: o.profile})
	if err != nil {
		return err
	}
	views := list.Secrets
	if o.json {
		if err := a.Con.JSON(views); err != nil {
			return err
		}
	} else {
		header, rows := []string{"NAME", "REFERENCE", "VALUE IN", "GOES TO", "RESULT"}, [][]string{}
		for _, v := range views {
			result := ""
			switch {
			case v.Error != "":
				result = v.Error
			case v.OK != nil:
				result = "ok"
			}
			in, to := "host", ""
			if v.Guest {
				in, to = "guest", "anywhere"
			}
			for i, host := range v.To {
				if i > 0 {
					to += ", "
				}
				to += string(host)
			}
			rows = append(rows, []string{v.Name, v.Reference, in, to, result})
		}
		a.Con.Table(header, rows)
		for _, v := range views {
			if v.Warning != "" {
				a.Con.Warn("%s", v.Warning)
			}
		}
	}
	for _, v := range slices.Backward(views) {
		if v.Error != "" {
			return fail.New(fail.Secret, "some secrets could not be resolved").WithHint("%s", v.Hint)
		}
	}
	return nil
}

// finding is one line of doctor's output.
type finding struct {
	Check  string `json:"check"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	Hint   string `json:"hint,omitempty"`

	tolerable bool // slow or inconvenient, but not broken
}

func NewDoctorCmd(a *app.App) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check whether this host can run sessions",
		Long: `Check whether this host can run sessions: settings, acceleration, programs, the guest
image, the network mode, tmux. Each problem is shown with the command that fixes it.
The exit status is 5 if sessions cannot be created.`,
		Example: `  agent-sessionizer doctor
  agent-sessionizer doctor --json | jq '.[] | select(.ok | not)'`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runDoctor(cmd.Context(), a, asJSON) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of findings")
	return cmd
}

// examine checks whether this host can run sessions.
func examine(ctx context.Context, a *app.App) (out []finding) {
	add := func(check, detail string, err error) {
		f := finding{Check: check, OK: err == nil, Detail: detail}
		if err != nil {
			f.Detail, f.Hint = err.Error(), fail.HintOf(err)
		}
		out = append(out, f)
	}
	cfg, err := a.Settings()
	if err == nil {
		add("settings", strings.Join(append([]string{"shipped defaults"}, cfg.Files...), ", "), nil)
		_, err := a.Manager(ctx)
		add("store", cfg.Paths.Store(), err)
		driver, err := a.Driver(app.QuietLog())
		add("vm driver", "Lima, in "+cfg.Paths.LimaHome, err)
		if err == nil {
			accel, err := driver.Accel(ctx, vm.HostArch())
			detail := accel.Name + " (checked in " + accel.Took.Round(100e3).String() + ")"
			if accel.Took == 0 {
				detail = accel.Name + " (known from an earlier check)"
			}
			if err == nil && accel.Name == "tcg" {
				err = fail.New(fail.Host, "%s: guests are emulated, 10 to 30 times slower: %s", detail, accel.Reason).
					WithHint("%s", accel.Hint)
				add("acceleration", detail, err)
				out[len(out)-1].tolerable = true
			} else {
				add("acceleration", detail, err)
			}
			problems := driver.Check(ctx, vm.HostArch())
			for _, p := range problems {
				add("host", "", p)
			}
			if len(problems) == 0 {
				add("host", "everything for VMs is installed", nil)
			}
		}
		images, err := app.Images(a)
		if err == nil {
			img, err := images.Lookup(cfg.Image, vm.HostArch())
			add("image", cfg.Image+" at "+img.Location, err)
		}
		set, err := cfg.For("", "")
		if err == nil {
			_, err = cfg.Policy(set, config.Additions{}, nil)
		}
		tolerable := err == nil && !set.Network.Enforced()
		if tolerable {
			err = fail.New(fail.Policy, "network.enforce is false: root in the guest can reach any address, including this host").
				WithHint("agent-sessionizer config edit # and remove network.enforce")
		}
		add("network", "mode "+string(set.Network.Mode)+", enforced on this host", err)
		out[len(out)-1].tolerable = tolerable
	} else {
		add("settings", "", err)
	}
	add("tmux", "the local tmux is supported", tmux.Client{}.Check(ctx))
	return out
}

func runDoctor(ctx context.Context, a *app.App, asJSON bool) error {
	out := examine(ctx, a)
	if asJSON {
		if err := a.Con.JSON(out); err != nil {
			return err
		}
	} else {
		for _, f := range out {
			mark := a.Con.Paint(console.Good, "✓")
			if !f.OK {
				mark = a.Con.Paint(console.Bad, "✗")
			}
			a.Printf("%s %-13s %s\n", mark, f.Check, termtext.Line(f.Detail))
			if f.Hint != "" {
				a.Printf("  %-13s hint: %s\n", "", f.Hint)
			}
		}
	}
	for _, f := range out {
		if !f.OK && !f.tolerable {
			return fail.New(fail.Host, "some checks failed")
		}
	}
	return nil
}
