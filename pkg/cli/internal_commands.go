package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/imagecmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/sessioncmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gc"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/keeper"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret/onepassword"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/lima"
)

// newHiddenCmds returns the commands that the program itself starts as processes. They
// check their arguments like any other command, because users can type them, too.
func newHiddenCmds(a *app.App) []*cobra.Command {
	cmds := []*cobra.Command{
		{
			Use: "keeper SESSION-ID", Args: app.Usage(sessionID),
			RunE: func(cmd *cobra.Command, args []string) error {
				cfg, err := a.Settings()
				if err != nil {
					return err
				}
				log, stop := a.OwnLog(cmd.Context(), cfg.Paths.KeeperLog(args[0]), cfg.Log, console.FormatJSON, "session", args[0])
				defer stop()
				w, err := worker(cmd.Context(), a, log)
				if err != nil {
					return err
				}
				return keeper.Run(cmd.Context(), log, &keeper.Session{Worker: w, ID: args[0]})
			},
		},
		{
			Use: task.KeeperCommand + " TASK-ID", Args: app.Usage(sessionID), // task ids have the same form
			RunE: func(cmd *cobra.Command, args []string) error {
				cfg, err := a.Settings()
				if err != nil {
					return err
				}
				log, stop := a.OwnLog(cmd.Context(), task.Dir(cfg.Paths.TaskDir(args[0])).KeeperLog(), cfg.Log, console.FormatJSON, "task_id", args[0])
				defer stop()
				w, err := taskWorker(cmd.Context(), a, log)
				if err != nil {
					return err
				}
				return keeper.Run(cmd.Context(), log, &keeper.Task{Worker: w, ID: args[0]})
			},
		},
		{
			Use: "attach-session SESSION-ID", Args: app.Usage(sessionID),
			RunE: func(cmd *cobra.Command, args []string) error { return runAttach(cmd.Context(), a, args[0]) },
		},
		{
			Use: secret.ChildCommand, Args: app.Usage(cobra.NoArgs),
			RunE: func(cmd *cobra.Command, _ []string) error {
				return secret.Main(cmd.Context(), os.Stdin, os.Stdout, secret.Options{OnePassword: onepassword.Resolve, Desktop: onepassword.Desktop})
			},
		},
		{
			// Lima's host agent takes Lima's arguments, which our copy of its command
			// parses.
			Use: "hostagent", DisableFlagParsing: true,
			RunE: func(cmd *cobra.Command, args []string) error {
				// Once the VM runs, the host agent only waits, for as long as the VM runs.
				debug.SetGCPercent(50)
				defer time.AfterFunc(time.Minute, debug.FreeOSMemory).Stop()
				return lima.HostAgent(cmd.Context(), args)
			},
		},
		{
			Use: gateway.Command + " DIR", Args: app.Usage(cobra.ExactArgs(1)),
			RunE: func(cmd *cobra.Command, args []string) error {
				// Run in the gateway's directory, which may be renamed while the gateway
				// runs.
				if err := os.Chdir(args[0]); err != nil {
					return fail.New(fail.Host, "enter gateway directory: %w", err)
				}
				// The gateway reads no settings; its directory contains its configuration.
				log, stop := a.OwnLog(cmd.Context(), gateway.LogFile("."), config.Log{}, console.FormatJSON)
				defer stop()
				return gateway.Main(cmd.Context(), ".", log)
			},
		},
		{
			Use: session.PrepareCommand + " IMAGE CPUS MEMORY DISK ARCH", Args: app.Usage(cobra.ExactArgs(5)),
			RunE: func(cmd *cobra.Command, args []string) error { return runPrepare(cmd.Context(), a, args) },
		},
		{
			Use: repo.DialCommand + " HOST PORT", Args: app.Usage(cobra.ExactArgs(2)),
			RunE: func(cmd *cobra.Command, args []string) error {
				return repo.DialMain(cmd.Context(), args[0], args[1], os.Stdin, os.Stdout)
			},
		},
		{
			Use: session.ProxyCommand + " SESSION", Args: app.Usage(cobra.ExactArgs(1)),
			RunE: func(cmd *cobra.Command, args []string) error {
				return sessioncmd.RunSSHProxy(cmd.Context(), a, args[0])
			},
		},
		{
			Use: app.SweepCommand, Args: app.Usage(cobra.NoArgs),
			RunE: func(cmd *cobra.Command, _ []string) error { return runSweep(cmd.Context(), a) },
		},
		{
			Use: prepareImageCommand + " IMAGE CPUS MEMORY DISK ARCH", Args: app.Usage(cobra.ExactArgs(5)),
			RunE: func(cmd *cobra.Command, args []string) error { return runPrepareImage(cmd.Context(), a, args) },
		},
		{
			Use: "fake-vm", DisableFlagParsing: true,
			RunE: func(cmd *cobra.Command, args []string) error { return app.FakeMain(cmd.Context(), args) },
		},
	}
	for _, c := range cmds {
		c.Hidden = true
		c.PreRunE = func(*cobra.Command, []string) error { return app.ForbidCoreDumps() }
	}
	return cmds
}

// prepareImageCommand is the part of session.AheadCommand that makes image files.
const prepareImageCommand = "prepare-image"

// runPrepare prepares in the background what makes the next session start faster. Standby VMs
// become sessions, so they must run at normal priority. Therefore a separate process makes
// the files at a low one.
func runPrepare(ctx context.Context, a *app.App, args []string) error {
	self, err := app.Self()
	if err != nil {
		return err
	}
	files := exec.CommandContext(ctx, self, append([]string{prepareImageCommand}, args...)...)
	files.Stdout, files.Stderr = os.Stdout, os.Stderr
	if err := files.Run(); err != nil {
		return fail.New(fail.Failure, "%s: %w", prepareImageCommand, err)
	}
	cfg, maker, size, err := prepareAhead(a, args)
	if err != nil {
		return err
	}
	made, err := maker.Images.Find(image.Golden(args[0]), args[4])
	if err != nil {
		return err
	}
	return imagecmd.FillPool(ctx, a, maker, cfg.Prepare, made, size)
}

// runPrepareImage makes image files. It lowers its priority, and that of all processes it
// starts, in favour of what people wait for.
func runPrepareImage(ctx context.Context, a *app.App, args []string) error {
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, 10); err != nil {
		return err
	}
	cfg, maker, size, err := prepareAhead(a, args)
	if err != nil {
		return err
	}
	_, err = imagecmd.PrepareImage(ctx, a, maker, cfg.Prepare, args[0], args[4], size)
	return err
}

// prepareAhead returns what session.AheadCommand works with.
func prepareAhead(a *app.App, args []string) (*config.Config, *golden.Maker, config.Resources, error) {
	cfg, err1 := a.Settings()
	maker, err2 := imagecmd.Maker(a)
	size, err3 := parseSize(args)
	return cfg, maker, size, errors.Join(err1, err2, err3)
}

// parseSize parses the arguments of session.AheadCommand.
func parseSize(args []string) (config.Resources, error) {
	cpus, err1 := strconv.Atoi(args[1])
	memory, err2 := strconv.ParseInt(args[2], 10, 64)
	disk, err3 := strconv.ParseInt(args[3], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return config.Resources{}, fail.New(fail.Usage, "%w", err)
	}
	return config.Resources{CPUs: cpus, Memory: config.Size(memory), Disk: config.Size(disk)}, nil
}

// sessionID accepts exactly one complete session id, because the id becomes part of paths.
func sessionID(cmd *cobra.Command, args []string) error {
	if err := cobra.ExactArgs(1)(cmd, args); err != nil {
		return err
	}
	if !ids.Valid(args[0]) {
		return fmt.Errorf("session id must be 12 hex digits, got %q", args[0])
	}
	return nil
}

// runAttach runs in the local tmux session. It shows the work on the session until it is
// ready, and then attaches the guest's tmux to this terminal. If it ends other than by
// detaching, it keeps the reason on the screen, because the pane would disappear with it.
func runAttach(ctx context.Context, a *app.App, id string) error {
	h, err := a.QuietHost(ctx)
	if err != nil {
		return err
	}
	for {
		err := attachGuest(ctx, a, h, id)
		if err == nil || ctx.Err() != nil {
			return err
		}
		if code, ok := errors.AsType[app.RemoteExit](err); ok {
			a.Con.Say("the guest's tmux ended with %v", code)
		} else {
			a.Con.Fail(err)
		}
		key, kerr := a.Key("Press r to retry, Enter to close this window. ", "r\rq")
		if kerr != nil || key != 'r' {
			return errors.Join(err, kerr)
		}
		if _, err := ops.StartSession.On(ctx, h, ops.SessionPath{ID: id}); err != nil {
			a.Con.Fail(err)
		}
	}
}

func attachGuest(ctx context.Context, a *app.App, h ops.Host, id string) error {
	s, err := ops.GetSession.On(ctx, h, ops.SessionPath{ID: id})
	if err != nil {
		return err
	}
	if s.State != session.Ready {
		if s.Desired != session.Ready {
			return fail.New(fail.Conflict, "session %s is %s", s.Name, s.State).WithHint("agent-sessionizer open %s", s.Name)
		}
		if s.State == session.Broken {
			return app.Broken(s)
		}
		a.Con.Say("%s of %s", s.Name, s.DisplayName())
		if s, err = app.Follow(ctx, a, h, s, session.Ready); err != nil {
			return err
		}
	}
	return sessioncmd.Terminal(ctx, a, h, s, guestclient.Guest{Root: s.Root}.AttachTmux(s.Dir), true)
}

func newCompletionCmd() *cobra.Command {
	return &cobra.Command{
		Use: "completion bash|zsh|fish", Short: "Print a shell completion script",
		Example: `  agent-sessionizer completion zsh >"${fpath[1]}/_agent-sessionizer"
  source <(agent-sessionizer completion bash)`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgs: []string{"bash", "zsh", "fish"},
		RunE: func(cmd *cobra.Command, args []string) error {
			switch args[0] {
			case "bash":
				return cmd.Root().GenBashCompletionV2(cmd.OutOrStdout(), true)
			case "zsh":
				return cmd.Root().GenZshCompletion(cmd.OutOrStdout())
			case "fish":
				return cmd.Root().GenFishCompletion(cmd.OutOrStdout(), true)
			}
			return fail.New(fail.Usage, "shell must be bash, zsh or fish, got %q", args[0])
		},
	}
}

// runSweep implements sweepCommand. Only one sweep runs at a time.
func runSweep(ctx context.Context, a *app.App) error {
	cfg, err := a.Settings()
	if err != nil {
		return err
	}
	lock, free, err := lockfile.Try(app.SweepLock(cfg.Paths))
	if err != nil || !free {
		return err
	}
	defer lock.Unlock()
	// Set the time before the work, so that a failing sweep is not repeated by every
	// command.
	if err := os.WriteFile(app.SweepLog(cfg.Paths), nil, 0o600); err != nil {
		return fail.New(fail.Host, "create sweep log: %w", err)
	}
	now := time.Now() // writing nothing to an empty file may not change its time
	if err := os.Chtimes(app.SweepLog(cfg.Paths), now, now); err != nil {
		return fail.New(fail.Host, "set time of sweep log: %w", err)
	}
	log, stop := a.OwnLog(ctx, app.SweepLog(cfg.Paths), cfg.Log, console.FormatJSON)
	defer stop()
	report, err := imagecmd.Prune(ctx, a, app.SweepCommand, imagecmd.PruneOptions{}, gc.Orphans()...)
	for _, o := range report.Removed {
		log.InfoContext(ctx, "orphan removed", "kind", o.Kind, "name", o.Name, "bytes", o.Size, "reason", o.Why)
	}
	return err
}
