package cli

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/lima"
)

func newImageCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Guest images: list, build, remove, prune",
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var asJSON bool
	list := &cobra.Command{
		Use: "list", Short: "List guest images", Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runImageList(a, asJSON) },
	}
	list.Flags().BoolVar(&asJSON, "json", false, "print an array of images")
	var o imageBuildOptions
	build := &cobra.Command{
		Use: "build", Short: "Build a guest image from Debian packages (Linux only)",
		Long: `Build a guest image from Debian packages, without downloading any image. It needs
mmdebstrap, qemu-img and mkfs.ext4, and root or unprivileged user namespaces.`,
		Example: `  agent-sessionizer image build --from debian
  agent-sessionizer open owner/repo --image debian`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runImageBuild(cmd.Context(), a, o) },
	}
	build.Flags().StringVar(&o.from, "from", "debian", "source of the image: debian")
	build.Flags().StringVar(&o.suite, "suite", "", "Debian release, "+image.DefaultSuite+" unless told")
	build.Flags().BoolVar(&o.rebuild, "rebuild", false, "build it also when nothing changed, for newer packages")
	build.Flags().BoolVar(&o.browser, "browser", false, "with the libraries of Playwright's browsers (250 MB)")
	remove := &cobra.Command{
		Use: "remove NAME", Aliases: []string{"rm"}, Short: "Remove a built image", Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runImageRemove(cmd.Context(), a, args[0]) },
	}
	prune := &cobra.Command{
		Use: "prune", Short: "Remove what newer images replaced and what builds left, except where a session builds on it",
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runImagePrune(a) },
	}
	cmd.AddCommand(list, build, remove, prune)
	return cmd
}

func (a *app) images() (*image.Store, error) {
	cfg, err := a.settings()
	if err != nil {
		return nil, err
	}
	template, err := a.template(cfg.Paths)
	return &image.Store{Dir: cfg.Paths.Images(), Template: template}, err
}

func runImageList(a *app, asJSON bool) error {
	images, err := a.images()
	if err != nil {
		return err
	}
	all, err := images.List()
	if err != nil {
		return err
	}
	if asJSON {
		return a.con.JSON(all)
	}
	header, rows := []string{"NAME", "ARCH", "SOURCE", "SIZE", "MADE", "READY"}, [][]string{}
	for _, i := range all {
		made, size, ready := "", "", "no"
		if !i.CreatedAt.IsZero() {
			made = ago(i.CreatedAt) + " ago"
		}
		if i.Size > 0 {
			size = config.Size(i.Size).String()
		}
		if i.Ready {
			ready = "yes"
		}
		rows = append(rows, []string{i.Name, i.Arch, i.Source, size, made, ready})
	}
	a.con.Table(header, rows)
	return nil
}

type imageBuildOptions struct {
	from    string
	suite   string
	rebuild bool
	browser bool
}

func runImageBuild(ctx context.Context, a *app, o imageBuildOptions) error {
	if o.from != "debian" {
		return fail.New(fail.Usage, "images are built --from debian; %q is not a source (ubuntu is downloaded when a session needs it)", o.from)
	}
	images, err := a.images()
	if err != nil {
		return err
	}
	scripts, err := fs.Sub(sessionizer.Provision, "provision")
	if err != nil {
		return err
	}
	program, err := guest.Program(session.Arch())
	if err != nil {
		return err
	}
	began := time.Now()
	view := a.con.Steps()
	defer view.Close()
	step := console.Step{Name: "build image debian", State: "start"}
	view.Update(step)
	info, err := images.Build(ctx, image.BuildOptions{
		Name: image.Debian, Suite: o.suite, Arch: session.Arch(), Provision: scripts, GuestProgram: program, Rebuild: o.rebuild,
		Browser: o.browser, Environ: os.Environ(),
		Progress: func(msg string) {
			if !a.con.Live() && strings.HasPrefix(msg, "step ") { // of provision/run.sh: one line each is kept
				view.Say("%s", msg)
			}
			step.State, step.Detail, step.Elapsed = "progress", msg, time.Since(began)
			view.Update(step)
		},
	})
	step.State, step.Detail, step.Elapsed = "done", "", time.Since(began)
	if err != nil {
		step.State = "failed"
	}
	view.Update(step)
	if err != nil {
		return err
	}
	a.printf("%s %s %v\n", info.Name, info.Path, config.Size(info.Size))
	return nil
}

// runImageRemove refuses while a session's disk is backed by the image's, or is
// about to be.
func runImageRemove(ctx context.Context, a *app, name string) error {
	images, err := a.images()
	if err != nil {
		return err
	}
	m, err := a.manager(ctx)
	if err != nil {
		return err
	}
	all, err := m.List(ctx)
	if err != nil {
		return err
	}
	for _, s := range all {
		if s.Spec.Image == name && !s.Facts.WasReady {
			return fail.New(fail.Conflict, "session %s is being made from image %s", s.Name, name).WithHint("agent-sessionizer list")
		}
	}
	inUse, err := a.imageInUse()
	if err != nil {
		return err
	}
	return images.Remove(name, inUse)
}

func runImagePrune(a *app) error {
	images, err := a.images()
	if err != nil {
		return err
	}
	inUse, err := a.imageInUse()
	if err != nil {
		return err
	}
	freed, err := images.Prune(inUse)
	if err != nil {
		return err
	}
	a.printf("%v freed\n", config.Size(freed))
	return nil
}

// imageInUse says of an image's directory whether disks of VMs are backed by it.
// It cannot be asked twice whether a disk still has its image, so doubt is use.
func (a *app) imageInUse() (func(dir string) bool, error) {
	cfg, err := a.settings()
	if err != nil {
		return nil, err
	}
	return func(dir string) bool {
		users, err := lima.ImageUsers(cfg.Paths.LimaHome, dir)
		for _, name := range users {
			a.con.Say("%s builds on %s", name, filepath.Base(dir))
		}
		if err != nil {
			a.con.Say("%v", err)
		}
		return err != nil || len(users) > 0
	}, nil
}
