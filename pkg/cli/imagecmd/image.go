// Package imagecmd has the commands that make, show and remove images and other files of this host.
package imagecmd

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gc"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/lima"
)

func NewImageCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "List, build, inspect, remove and prune guest images",
		Example: `  agent-sessionizer image list
  agent-sessionizer image build --from debian`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var asJSON bool
	var arch string
	list := &cobra.Command{
		Use: "list", Short: "List guest images, saved setups, standby VMs and builds", Args: app.Usage(cobra.NoArgs),
		Example: `  agent-sessionizer image list`,
		RunE:    func(cmd *cobra.Command, _ []string) error { return runImageList(cmd.Context(), a, asJSON) },
	}
	list.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	var o imageBuildOptions
	build := &cobra.Command{
		Use: "build", Short: "Build a guest image and prepare it for fast starts",
		Long: `Build a guest image and prepare it, so that sessions start fast. Preparation makes a
golden image, which has been booted and given its tools once, and saves the memory of a
VM that was booted from it (see "prepare" in config.yaml). All of this also happens
automatically, in the background, after the first session. This command does it
immediately.

--from debian builds the image from Debian packages, without downloading any image
(Linux only). It needs mmdebstrap, qemu-img and mkfs.ext4, and root or unprivileged
user namespaces. --from ubuntu starts from the cloud image that the VM template names.
--from with a path or URL starts from your own cloud image: Debian's or Ubuntu's, with
cloud-init.

--arch makes an image of another architecture than this host's, for "open --arch". QEMU
emulates its VMs, which takes many times as long.`,
		Example: `  agent-sessionizer image build --from debian
  agent-sessionizer image build --from ubuntu --prepare warm --cpus 4 --memory 8GiB
  agent-sessionizer image build --from debian --arch aarch64
  agent-sessionizer open owner/repo --image debian`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runImageBuild(cmd.Context(), a, o) },
	}
	build.Flags().StringVar(&o.from, "from", image.Debian, "`SOURCE` of the image: debian, ubuntu, PATH or URL#sha256:HEX of a cloud image")
	build.Flags().StringVar(&o.suite, "suite", "", "`RELEASE` of Debian (default "+image.DefaultSuite+")")
	build.Flags().StringVar(&o.arch, "arch", "", "`ARCH` of the image: x86_64 or aarch64 (default this host's)")
	build.Flags().BoolVar(&o.rebuild, "rebuild", false, "build even if nothing changed, to get newer packages")
	build.Flags().BoolVar(&o.browser, "browser", false, "include the libraries of Playwright's browsers (250 MB)")
	build.Flags().StringVar(&o.prepare, "prepare", "", "`WHAT` to prepare: none, golden, warm or pool (default as configured)")
	build.Flags().IntVar(&o.resources.CPUs, "cpus", 0, "`N` CPUs for the saved or standby VM (default as configured)")
	build.Flags().Var(&o.resources.Memory, "memory", "memory of that VM, such as 8GiB (default as configured)")
	inspect := &cobra.Command{
		Use: "inspect NAME", Short: "Show the files, saved VMs and users of an image", Args: app.Usage(cobra.ExactArgs(1)),
		Example:           `  agent-sessionizer image inspect debian.golden`,
		ValidArgsFunction: complete.Args(complete.BuiltImages(a)),
		RunE:              func(cmd *cobra.Command, args []string) error { return runImageInspect(a, args[0], arch, asJSON) },
	}
	inspect.Flags().StringVar(&arch, "arch", "", "`ARCH` of the image: x86_64 or aarch64 (default this host's)")
	inspect.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	remove := &cobra.Command{
		Use: "remove NAME", Aliases: []string{"rm"}, Short: "Remove a built image or a saved setup", Args: app.Usage(cobra.ExactArgs(1)),
		Example:           `  agent-sessionizer image remove debian.golden`,
		ValidArgsFunction: complete.Args(complete.Removable(a)),
		RunE:              func(cmd *cobra.Command, args []string) error { return runImageRemove(cmd.Context(), a, args[0]) },
	}
	var p PruneOptions
	prune := &cobra.Command{
		Use: "prune", Short: "Remove unused images, standby VMs and build leftovers",
		Long: `Remove replaced images, unused standby VMs and leftovers of interrupted builds. An image
stays while a session's disk is based on it. "agent-sessionizer prune" does this and
more.`,
		Example: `  agent-sessionizer image prune --dry-run`,
		Args:    app.Usage(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return runPrune(cmd.Context(), a, p, gc.Images) },
	}
	p.flags(prune)
	cmd.AddCommand(list, build, inspect, remove, prune)
	return cmd
}

func runImageList(ctx context.Context, a *app.App, asJSON bool) error {
	h, err := a.QuietHost(ctx)
	if err != nil {
		return err
	}
	list, err := ops.ListImages.On(ctx, h, struct{}{})
	if err != nil {
		return err
	}
	if asJSON {
		return a.Con.JSON(list)
	}
	header, rows := []string{"NAME", "ARCH", "FROM", "SIZE", "SAVED VMS", "CREATED", "READY"}, [][]string{}
	for _, i := range list.Images {
		made, size, ready := "", "", "no"
		if !i.CreatedAt.IsZero() {
			made = console.Ago(i.CreatedAt) + " ago"
		}
		if i.Size > 0 {
			size = config.Size(i.Size).String()
		}
		switch {
		case i.Ready && i.Path == "": // a cloud image, which is downloaded
			ready = "on first use"
		case i.Ready:
			ready = "yes"
		}
		var warm []string
		for _, w := range i.Warm {
			warm = append(warm, fmt.Sprintf("%d CPUs, %v: %v", w.CPUs, config.Size(w.Memory), config.Size(w.Size)))
		}
		rows = append(rows, []string{i.Name, i.Arch, i.Source, size, strings.Join(warm, "; "), made, ready})
	}
	a.Con.Table(header, rows)
	for _, s := range list.Pool {
		a.Printf("%s is a standby VM: %d CPUs, %v of memory, created %s ago\n", s.VM, s.CPUs, config.Size(s.Memory), console.Ago(s.CreatedAt))
	}
	for _, b := range list.Setups {
		a.Printf("%s is a saved setup: %s, branch %s, %v, created %s ago, last used %s ago\n", b.VM, b.RepoKey, b.Branch, config.Size(b.Size), console.Ago(b.CreatedAt), console.Ago(b.UsedAt))
	}
	for _, m := range list.Making {
		a.Printf("%s is being built, for %s: %s\n", m.Name, console.Ago(m.Since), m.Doing)
	}
	for _, f := range list.Failures {
		kept := ""
		if f.Kept {
			kept = "; the built disk is kept, and the next build only tests it"
		}
		a.Printf("failed %s ago: %s%s\n", console.Ago(f.At), f.Error, kept) // the message says which image or saved state failed
	}
	return nil
}

// imageView is the JSON output of image inspect.
type imageView struct {
	image.Info
	UsedBy []string `json:"used_by"` // VMs whose disks are backed by it
}

func runImageInspect(a *app.App, name, arch string, asJSON bool) error {
	arch, err := parseArch(arch)
	if err != nil {
		return err
	}
	images, err := app.Images(a)
	if err != nil {
		return err
	}
	i, err := images.Find(name, arch)
	if err != nil {
		return err
	}
	v := imageView{Info: i, UsedBy: []string{}}
	if i.Path != "" {
		cfg, err := a.Settings()
		if err != nil {
			return err
		}
		users, err := lima.ImageUsers(cfg.Paths.LimaHome, i.Path)
		if err != nil {
			return err
		}
		v.UsedBy = append(v.UsedBy, users...)
	}
	if asJSON {
		return a.Con.JSON(v)
	}
	text, err := config.Text(v)
	if err != nil {
		return err
	}
	a.Printf("%s", text)
	return nil
}

// parseArch returns the architecture that --arch names: the host's if it was not set.
func parseArch(name string) (string, error) {
	arch, err := vm.ParseArch(cmp.Or(name, vm.HostArch()))
	if err != nil {
		return "", fmt.Errorf("--arch: %w", err)
	}
	return arch, nil
}

type imageBuildOptions struct {
	from      string
	suite     string
	arch      string // "" means the host's
	rebuild   bool
	browser   bool
	prepare   string
	resources config.Resources
}

func runImageBuild(ctx context.Context, a *app.App, o imageBuildOptions) error {
	from, err := app.AbsoluteImage(o.from)
	if err != nil {
		return err
	}
	source, err := image.Resolve(from)
	if err != nil {
		return err
	}
	if o.from = source.String(); source.Location == "" && o.from != image.Debian && o.from != image.Ubuntu {
		return fail.New(fail.Usage, "--from must be debian, ubuntu, or the path or URL of a cloud image, got %q", o.from)
	}
	if o.arch, err = parseArch(o.arch); err != nil {
		return err
	}
	cfg, err := a.Settings()
	if err != nil {
		return err
	}
	prepare := cfg.Prepare
	if o.prepare != "" {
		if prepare, err = config.ParsePrepare(o.prepare); err != nil {
			return err
		}
	}
	images, err := app.Images(a)
	if err != nil {
		return err
	}
	if prepare != config.PrepareNone { // not after the build, which takes long
		driver, err := a.Driver(app.QuietLog())
		if err != nil {
			return err
		}
		if err := app.CanRun(ctx, driver, o.arch); err != nil {
			return err
		}
	}
	if o.from == image.Debian {
		scripts, err := fs.Sub(sessionizer.Provision, "provision")
		if err != nil {
			return err
		}
		program, err := guestclient.Program(o.arch)
		if err != nil {
			return err
		}
		info, err := makeImage(ctx, a, "build image debian", func(ctx context.Context, say func(string)) (image.Info, error) {
			return images.Build(ctx, image.BuildOptions{
				Name: image.Debian, Suite: o.suite, Arch: o.arch, Provision: scripts, GuestProgram: program, Rebuild: o.rebuild,
				Browser: o.browser, Environ: os.Environ(), Progress: say,
			})
		})
		if err != nil {
			return err
		}
		a.Printf("%s %s %v\n", info.Name, info.Path, config.Size(info.Size))
	}
	if prepare == config.PrepareNone {
		return nil
	}
	maker, err := Maker(a)
	if err != nil {
		return err
	}
	size, err := size(ctx, a, o.resources)
	if err != nil {
		return err
	}
	made, err := PrepareImage(ctx, a, maker, prepare, o.from, o.arch, size)
	if err != nil {
		return err
	}
	return FillPool(ctx, a, maker, prepare, made, size)
}

// Maker returns the maker of golden images, saved states and standby VMs, without a log.
func Maker(a *app.App) (*golden.Maker, error) {
	driver, err := a.Driver(app.QuietLog())
	if err != nil {
		return nil, err
	}
	return Golden(a, driver)
}

// size returns the size of a session's VM. Zero fields of asked are taken from the
// settings.
func size(ctx context.Context, a *app.App, asked config.Resources) (config.Resources, error) {
	m, err := a.PlainManager(ctx)
	if err != nil {
		return config.Resources{}, err
	}
	return m.Size(asked)
}

// PrepareImage makes the golden image of source. If prepare is warm and VMs can be saved,
// it also makes the saved state for VMs of the given size.
func PrepareImage(ctx context.Context, a *app.App, maker *golden.Maker, prepare config.Prepare, source, arch string, size config.Resources) (image.Info, error) {
	made, err := makeImage(ctx, a, "build golden image "+image.Golden(source), func(ctx context.Context, say func(string)) (image.Info, error) {
		return maker.Image(ctx, source, arch, say)
	})
	if err != nil {
		return made, err
	}
	a.Printf("%s %s %v\n", made.Name, made.Path, config.Size(made.Size))
	if prepare != config.PrepareWarm {
		return made, nil
	}
	if err := maker.CanWarm(ctx, arch); err != nil {
		a.Con.Say("%v; sessions start as clones", err)
		return made, nil
	}
	warm, err := makeImage(ctx, a, fmt.Sprintf("save VM with %d CPUs and %v", size.CPUs, size.Memory), func(ctx context.Context, say func(string)) (image.Warm, error) {
		return maker.Warm(ctx, made, size.CPUs, int64(size.Memory), say)
	})
	if err != nil {
		return made, err
	}
	a.Printf("%s %v\n", warm.Path, config.Size(warm.Size))
	return made, nil
}

// FillPool boots the missing standby VMs, if the pool is in use.
func FillPool(ctx context.Context, a *app.App, maker *golden.Maker, prepare config.Prepare, made image.Info, size config.Resources) error {
	if !maker.Pools(ctx, prepare, made.Arch) {
		return nil
	}
	_, err := makeImage(ctx, a, fmt.Sprintf("boot standby VMs: %d", maker.Pool.Waiting), func(ctx context.Context, say func(string)) (struct{}, error) {
		return struct{}{}, maker.Pool.Fill(ctx, made, session.SizeOf(size), say)
	})
	return err
}

// makeImage runs f and shows it as a step, with its progress lines.
func makeImage[T any](ctx context.Context, a *app.App, name string, f func(ctx context.Context, say func(string)) (T, error)) (T, error) {
	began := time.Now()
	view := a.Con.Steps()
	defer view.Close()
	step := console.Step{Name: name, State: "start"}
	view.Update(step)
	made, err := f(ctx, func(msg string) {
		if !a.Con.Live() && strings.HasPrefix(msg, "step ") { // keep one line for each step of provision/run.sh
			view.Say("%s", msg)
		}
		step.State, step.Detail, step.Elapsed = "progress", msg, time.Since(began)
		view.Update(step)
	})
	step.State, step.Detail, step.Elapsed = "done", "", time.Since(began)
	if err != nil {
		step.State = "failed"
	}
	view.Update(step)
	return made, err
}

// runImageRemove removes an image that nothing uses, or a saved setup.
func runImageRemove(ctx context.Context, a *app.App, name string) error {
	if strings.HasPrefix(name, session.SetupVMPrefix) {
		cfg, err := a.Settings()
		if err != nil {
			return err
		}
		driver, err := a.Driver(app.QuietLog())
		if err != nil {
			return err
		}
		return session.SavedSetups{Paths: cfg.Paths}.RemoveUnused(ctx, driver, name)
	}
	images, err := app.Images(a)
	if err != nil {
		return err
	}
	m, err := a.Manager(ctx)
	if err != nil {
		return err
	}
	return gc.RemoveImage(ctx, m, images, name, a.Con.Say)
}
