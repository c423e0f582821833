package cli

import (
	"context"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/release"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

type versionOptions struct {
	licenses bool
	check    bool
	feed     string
	json     bool
}

func newVersionCmd(a *app.App) *cobra.Command {
	var o versionOptions
	cmd := &cobra.Command{
		Use: "version", Short: "Print the version or licences, or check for a release",
		Long: `Print the version of this program.

--check requests the newest release from the feed once, and compares the versions. No
other command contacts the feed. --check never downloads or installs a program.`,
		Args: app.Usage(cobra.NoArgs),
		Example: `  agent-sessionizer version
  agent-sessionizer version --check
  agent-sessionizer version --licenses | less`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("feed") && !o.check {
				return fail.New(fail.Usage, "--feed requires --check").WithHint("%s", app.Again(cmd, nil, "--check"))
			}
			return runVersion(cmd.Context(), a, o)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.licenses, "licenses", false, "print the licences of the program and of all software in it")
	f.BoolVar(&o.check, "check", false, "request the newest release and compare")
	f.StringVar(&o.feed, "feed", release.Feed, "`URL` of the release feed, with --check")
	f.BoolVar(&o.json, "json", false, "print JSON")
	cmd.MarkFlagsMutuallyExclusive("licenses", "check")
	cmd.MarkFlagsMutuallyExclusive("licenses", "json")
	return cmd
}

func runVersion(ctx context.Context, a *app.App, o versionOptions) error {
	switch {
	case o.licenses:
		text, err := release.Notices()
		if err != nil {
			return err
		}
		a.Printf("%s", text)
		return nil
	case o.check:
		return checkRelease(ctx, a, o)
	case o.json:
		return a.Con.JSON(map[string]string{"version": app.Version})
	}
	a.Printf("agent-sessionizer %s\n", app.Version)
	return nil
}

func checkRelease(ctx context.Context, a *app.App, o versionOptions) error {
	latest, err := release.Latest(ctx, http.DefaultClient, o.feed)
	if err != nil {
		return fail.New(fail.Host, "%w", err).WithHint("%s", ssh.Quote("curl", "-fsSI", o.feed))
	}
	order, known := release.Compare(app.Version, latest)
	if o.json {
		return a.Con.JSON(struct {
			Version string `json:"version"`
			Latest  string `json:"latest"`
			Newer   *bool  `json:"newer"` // whether the release is newer; null if this build is not based on a release
		}{app.Version, latest, pointerIf(known, order < 0)})
	}
	switch {
	case !known:
		a.Printf("agent-sessionizer %s is not a release; the newest release is %s\n", app.Version, latest)
	case order < 0:
		a.Printf("agent-sessionizer %s is older than the newest release, %s\n", app.Version, latest)
	case order > 0:
		a.Printf("agent-sessionizer %s is newer than the newest release, %s\n", app.Version, latest)
	default:
		a.Printf("agent-sessionizer %s is up to date: it is the newest release\n", app.Version)
	}
	return nil
}

func pointerIf[T any](ok bool, v T) *T {
	if !ok {
		return nil
	}
	return &v
}
