package guestagent

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/boot"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/clauderun"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/codexrun"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/netguard"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/observe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/secrets"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/subtask"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/taskrun"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/trust"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// command is one command of the program.
type command struct {
	name  string // one or two words
	args  string // as the usage shows them
	help  string
	takes int // number of arguments, or variadic
	flags func(*flag.FlagSet, *options)
	run   func(context.Context, *call) error
}

// variadic marks a command that takes any arguments. Without flags, they are not parsed.
const variadic = -1

// options holds the values of all commands' flags.
type options struct {
	log    netguard.LogOptions
	wipe   bool
	watch  observe.Options
	ask    observe.AskOptions
	output taskrun.Offsets
	home   homeOptions
	codex  codexrun.Options
	claude clauderun.Options
}

// call is one use of a command.
type call struct {
	options
	guest     sys.Guest
	version   string
	args      []string
	in        io.Reader
	out, errs io.Writer
}

// commands returns the table from which usage and dispatch come.
func commands() []command {
	return []command{
		{"install", "", "install policy (stdin) and service, print status", 0, nil, func(ctx context.Context, c *call) error {
			if err := boot.AllowCertificates(c.guest); err != nil {
				return err
			}
			return printStatus(c.out)(netguard.Install(ctx, c.guest, c.in))
		}},
		{"policy", "", "replace the policy (stdin), print status", 0, nil, func(ctx context.Context, c *call) error {
			return printStatus(c.out)(netguard.SetPolicy(ctx, c.guest, c.in))
		}},
		{"status", "", "print status", 0, nil, func(ctx context.Context, c *call) error {
			return printStatus(c.out)(netguard.Ask(ctx, c.guest, "status"))
		}},
		{"log", "[--since SEQ] [--limit N] [--follow]", "print the query log", 0, func(f *flag.FlagSet, o *options) {
			f.Int64Var(&o.log.Since, "since", -1, "")
			f.IntVar(&o.log.Limit, "limit", 0, "")
			f.BoolVar(&o.log.Follow, "follow", false, "")
		}, func(ctx context.Context, c *call) error { return netguard.PrintLog(ctx, c.guest, c.out, c.log) }},
		{"secrets", "[--wipe]", "replace the secrets (stdin), or remove them", 0, func(f *flag.FlagSet, o *options) {
			f.BoolVar(&o.wipe, "wipe", false, "")
		}, func(_ context.Context, c *call) error {
			if c.wipe {
				return secrets.Wipe(c.guest)
			}
			return secrets.Set(c.guest, c.in)
		}},
		{"quiesce", "", "end the agent's programs, print their names", 0, nil, func(ctx context.Context, c *call) error {
			return quiesce(ctx, c.guest, c.out)
		}},
		{"trust", "", "trust a certificate authority (stdin) instead of the one before", 0, nil, func(ctx context.Context, c *call) error {
			return trust.Set(ctx, c.guest, c.in)
		}},
		{"runc", "ARGUMENT…", "run runc, and make containers trust what the guest trusts", variadic, nil, func(_ context.Context, c *call) error {
			return trust.Runc(c.guest, c.args)
		}},
		{"credential", "get|store|erase", "git's credential helper", 1, nil, func(_ context.Context, c *call) error {
			return secrets.Credential(c.guest, c.args[0], c.in, c.out)
		}},
		{"hook", "AGENT [JSON]", "record what an agent's hook reports (stdin)", variadic, nil, func(ctx context.Context, c *call) error {
			frugal()
			observe.Hook(ctx, c.guest, c.args, c.in, c.out)
			return nil
		}},
		{"ask", "[--choice TEXT]… QUESTION", "ask the user, wait for the answer, and print it; with --choice, only one of the choices is accepted", 1, func(f *flag.FlagSet, o *options) {
			f.Func("choice", "", func(text string) error {
				o.ask.Choices = append(o.ask.Choices, text)
				return nil
			})
		}, func(ctx context.Context, c *call) error {
			frugal()
			return observe.Ask(ctx, c.guest, c.args[0], c.ask, c.out)
		}},
		{"claude", "[--model MODEL] [--max-turns N] [--tools LIST] PROMPT", "run Claude Code unattended; the user answers its requests", 1, func(f *flag.FlagSet, o *options) {
			f.StringVar(&o.claude.Model, "model", "", "")
			f.IntVar(&o.claude.MaxTurns, "max-turns", 0, "")
			f.StringVar(&o.claude.Tools, "tools", "", "")
		}, func(ctx context.Context, c *call) error {
			frugal()
			return clauderun.Run(ctx, c.guest, c.claude, c.args[0], c.out, c.errs)
		}},
		{"codex", "[--model MODEL] PROMPT", "run Codex unattended; the user answers its requests", 1, func(f *flag.FlagSet, o *options) {
			f.StringVar(&o.codex.Model, "model", "", "")
		}, func(ctx context.Context, c *call) error {
			frugal()
			return codexrun.Run(ctx, c.guest, c.codex, c.args[0], c.out, c.errs)
		}},
		{"prompt", "", "type a text (stdin) into the running agent", 0, nil, func(ctx context.Context, c *call) error {
			return observe.Prompt(ctx, c.guest, c.in)
		}},
		{"bell", "WINDOW", "record the bell of a tmux window", 1, nil, func(_ context.Context, c *call) error {
			observe.Bell(c.guest, c.args[0])
			return nil
		}},
		{"watch", "[--dir DIR --base COMMIT]", "print a snapshot at each change, until stdin ends", 0, func(f *flag.FlagSet, o *options) {
			f.StringVar(&o.watch.Dir, "dir", "", "")
			f.StringVar(&o.watch.Base, "base", "", "")
		}, func(ctx context.Context, c *call) error {
			frugal()
			return observe.Watch(ctx, c.guest, c.watch, c.in, c.out)
		}},
		{"home bring", "[--first]", "install dotfiles (stdin)", variadic, homeFlags, bringHome},
		{"home save", "[--not LIST] [--max N] PATTERN…", "save files of the home directory (stdout)", variadic, homeFlags, saveHome},
		{"home restore", "[--first] [--not LIST] [--max N] PATTERN…", "restore a saved home (stdin)", variadic, homeFlags, restoreHome},
		{"task start", "ID/ATTEMPT", "start an unattended agent (stdin) once, print its state", 1, nil, onAttempt(func(ctx context.Context, c *call, a taskrun.Attempt) error {
			return a.Start(ctx, c.in, c.out)
		})},
		{"task run", "ID/ATTEMPT", "run the agent to its end, as its unit does", 1, nil, onAttempt(func(ctx context.Context, _ *call, a taskrun.Attempt) error {
			frugal()
			return a.Run(ctx)
		})},
		{"task status", "ID/ATTEMPT", "print the agent's state", 1, nil, onAttempt(func(_ context.Context, c *call, a taskrun.Attempt) error {
			return a.Status().Encode(c.out)
		})},
		{"task watch", "[--stdout N] [--stderr N] [--max N] ID/ATTEMPT", "send the agent's output and state, until stdin ends", 1, func(f *flag.FlagSet, o *options) {
			f.Int64Var(&o.output.Stdout, "stdout", 0, "")
			f.Int64Var(&o.output.Stderr, "stderr", 0, "")
			f.Int64Var(&o.output.Most, "max", 0, "")
		}, onAttempt(func(ctx context.Context, c *call, a taskrun.Attempt) error {
			frugal()
			return a.Watch(ctx, c.output, c.in, c.out)
		})},
		{"task signal", "ID/ATTEMPT TERM|KILL", "send a signal to the agent's processes, print its state", 2, nil, onAttempt(func(_ context.Context, c *call, a taskrun.Attempt) error {
			return a.Signal(c.args[1], c.out)
		})},
		{"task artifacts", "ID [--json] [--get NAME]", "list a subtask's artifacts, or print one", variadic, nil, func(ctx context.Context, c *call) error {
			if len(c.args) != 1 || !strings.Contains(c.args[0], "/") {
				return subtask.Artifacts(ctx, c.guest, c.args, subtask.IO{In: c.in, Out: c.out, Errs: c.errs})
			}
			return onAttempt(func(ctx context.Context, c *call, a taskrun.Attempt) error { return a.Collect(ctx, c.in, c.out) })(ctx, c)
		}},
		{"task submit", "[--name N] [--agent claude|codex] [--model M] [--branch B] [--commit C] [--key K] (--prompt TEXT | -- COMMAND…), or [--key K] -f FILE", "submit a subtask, print its id", variadic, nil, onHost(subtask.Submit)},
		{"task list", "[--json]", "list the subtasks", variadic, nil, onHost(subtask.List)},
		{"task show", "ID", "print a subtask as JSON", variadic, nil, onHost(subtask.Show)},
		{"task wait", "[--timeout D] ID…", "wait for subtasks to end; exit 1 if one did not succeed, 124 after the timeout", variadic, nil, onHost(subtask.Wait)},
		{"task fetch", "ID", "fetch a subtask's commits into the local branch agent-ID", variadic, nil, onHost(subtask.Fetch)},
		{"task cancel", "ID", "cancel a subtask and everything below it", variadic, nil, onHost(subtask.Cancel)},
		{"mcp", "", "offer subtask tools over the Model Context Protocol (stdio)", 0, nil, func(ctx context.Context, c *call) error {
			frugal()
			return subtask.MCP(ctx, c.guest, subtask.IO{In: c.in, Out: c.out, Errs: c.errs})
		}},
		{"task send", "ID/ATTEMPT", "send collected results", 1, nil, onAttempt(func(ctx context.Context, c *call, a taskrun.Attempt) error {
			return a.Send(ctx, c.in, c.out)
		})},
		{"daemon", "", "run the daemon, as the service does", 0, nil, func(ctx context.Context, c *call) error {
			reload := make(chan os.Signal, 1)
			signal.Notify(reload, syscall.SIGHUP)
			defer signal.Stop(reload)
			return netguard.Daemon(ctx, c.guest, c.version, reload, readyOnce(ctx))
		}},
		{"lockdown", "", "close the network", 0, nil, func(ctx context.Context, c *call) error { return netguard.Lockdown(ctx, c.guest) }},
		{"seed", "", "give a clone of a golden image its own identity", 0, nil, func(ctx context.Context, c *call) error {
			return boot.Seed(ctx, c.guest, readyOnce(ctx))
		}},
		{"sleep", "", "wait for the snapshot, then take the identity that the host sends", 0, nil, func(ctx context.Context, c *call) error {
			return boot.Sleep(ctx, c.guest)
		}},
		{"fork prepare", "", "start what gives a fork of this machine its own identity", 0, nil, func(ctx context.Context, c *call) error {
			return boot.PrepareFork(ctx, c.guest)
		}},
		{"fork wait", "", "wait for the identity that the host sends to a fork, and take it", 0, nil, func(ctx context.Context, c *call) error {
			frugal()
			return boot.AwaitFork(ctx, c.guest, readyOnce(ctx))
		}},
		{"hostname", "NAME", "set the host name until the next boot", 1, nil, func(_ context.Context, c *call) error {
			return boot.SetHostname(c.guest, c.args[0])
		}},
		{"unit", "", "print the daemon's systemd unit", 0, nil, func(_ context.Context, c *call) error {
			_, err := io.WriteString(c.out, netguard.Unit)
			return err
		}},
		{"stop", "", "stop the daemon of a fake guest", 0, nil, func(ctx context.Context, c *call) error {
			_, err := netguard.Ask(ctx, c.guest, "stop")
			return err
		}},
		{"version", "", "print the version", 0, nil, func(_ context.Context, c *call) error {
			_, err := fmt.Fprintln(c.out, c.version)
			return err
		}},
	}
}

// forAgents lists the commands for agents and scripts. The others are for the host, services
// and hooks.
var forAgents = []string{"ask", "task submit", "task list", "task show", "task wait", "task artifacts", "task fetch", "task cancel", "mcp"}

// usage describes the commands for agents, only those that begin with a word unless it is "".
func usage(word string) string {
	var text strings.Builder
	text.WriteString("usage: agent-guest COMMAND\n")
	all := commands()
	for _, name := range forAgents {
		if i := slices.IndexFunc(all, func(c command) bool { return c.name == name }); word == "" || strings.HasPrefix(name, word+" ") {
			text.WriteString(all[i].usage())
		}
	}
	return text.String()
}

// fullUsage describes all commands.
func fullUsage() string {
	var text strings.Builder
	text.WriteString(usage("") + "for the host, services and hooks:\n")
	for _, c := range commands() {
		if !slices.Contains(forAgents, c.name) {
			text.WriteString(c.usage())
		}
	}
	return text.String()
}

func (c command) usage() string {
	use := strings.TrimSpace(c.name + " " + c.args)
	if len(use) > 38 {
		use += "\n" + strings.Repeat(" ", 40)
	}
	return fmt.Sprintf("  %-38s %s\n", use, c.help)
}

// dispatch runs the command that args begin with.
func dispatch(ctx context.Context, args []string, c *call) error {
	if len(args) == 0 {
		return fail.New(fail.Usage, "no command\n%s", usage(""))
	}
	switch {
	case isHelp(args[0]):
		_, err := io.WriteString(c.out, fullUsage())
		return err
	case args[0] == "task" && (len(args) == 1 || isHelp(args[1])):
		_, err := io.WriteString(c.out, usage("task"))
		return err
	}
	for _, cmd := range commands() {
		words := strings.Fields(cmd.name)
		if len(args) < len(words) || strings.Join(args[:len(words)], " ") != cmd.name {
			continue
		}
		c.args = args[len(words):]
		if len(c.args) > 0 && c.args[0] != "help" && isHelp(c.args[0]) && slices.Contains(forAgents, cmd.name) {
			_, err := io.WriteString(c.out, "usage: agent-guest\n"+cmd.usage())
			return err
		}
		if cmd.takes != variadic || cmd.flags != nil {
			flags := flag.NewFlagSet(cmd.name, flag.ContinueOnError)
			flags.SetOutput(io.Discard)
			if cmd.flags != nil {
				cmd.flags(flags, &c.options)
			}
			if err := flags.Parse(c.args); err != nil {
				return fail.New(fail.Usage, "%s: %w\nusage: agent-guest\n%s", cmd.name, err, cmd.usage())
			}
			c.args = flags.Args()
		}
		if cmd.takes != variadic && len(c.args) != cmd.takes {
			return fail.New(fail.Usage, "%s: arguments after its flags: got %d, want %d\nusage: agent-guest\n%s", cmd.name, len(c.args), cmd.takes, cmd.usage())
		}
		return cmd.run(ctx, c)
	}
	word := ""
	if args[0] == "task" {
		word = args[0]
	}
	return fail.New(fail.Usage, "unknown command %q\n%s", guestproto.Clean(strings.Join(args[:min(len(args), 2)], " ")), usage(word))
}

func isHelp(arg string) bool { return slices.Contains([]string{"help", "-h", "--help"}, arg) }

// onHost runs a command that asks the host.
func onHost(run func(context.Context, sys.Guest, []string, subtask.IO) error) func(context.Context, *call) error {
	return func(ctx context.Context, c *call) error {
		frugal()
		return run(ctx, c.guest, c.args, subtask.IO{In: c.in, Out: c.out, Errs: c.errs})
	}
}

// onAttempt runs a command on the attempt that its first argument names.
func onAttempt(run func(context.Context, *call, taskrun.Attempt) error) func(context.Context, *call) error {
	return func(ctx context.Context, c *call) error {
		a, err := taskrun.Open(c.guest, c.args[0])
		if err != nil {
			return err
		}
		return run(ctx, c, a)
	}
}

func printStatus(out io.Writer) func(guestproto.Status, error) error {
	return func(s guestproto.Status, err error) error {
		if err != nil {
			return err
		}
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(s)
	}
}

// frugal makes the garbage collector trade speed for memory: the live heap is a few
// hundred kilobytes, so collections cost next to nothing.
func frugal() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(16 << 20)
}
