package guestagent

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const usage = `usage: agent-guest COMMAND
  install                                install policy (stdin) and service, print status
  policy                                 replace the policy (stdin), print status
  status                                 print status
  log [--since SEQ] [--limit N] [--follow]   print the query log
  secrets [--wipe]                       replace the secrets (stdin), or remove them
  credential get|store|erase             git's credential helper
  hook AGENT [JSON]                      record what an agent's hook reports (stdin)
  bell WINDOW                            record the bell of a tmux window
  watch [--dir DIR --base COMMIT]        print a snapshot at each change, until stdin ends
  home bring|save|restore                dotfiles (stdin), saved home (stdout), saved home (stdin)
  task start|run|status|watch|signal|artifacts|send ID/ATTEMPT   an unattended agent and its results
  daemon                                 run the daemon, as the service does
  lockdown                               close the network
  seed                                   give a clone of a golden image its own identity
  sleep                                  wait for the snapshot, then take the identity that the host sends
  hostname NAME                          set the host name until the next boot
  unit                                   print the daemon's systemd unit
  stop                                   stop the daemon of a fake guest
  version
`

// Main runs the program and returns its exit status.
func Main(version string, args []string, in io.Reader, out, errs io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if isInitrd() {
		return int(fail.CodeOf(Initrd()))
	}
	g := FromEnv()
	if len(args) > 0 && args[0] == "hook" {
		g.Hook(args[1:], in)
		return 0
	}
	if len(args) == 2 && args[0] == "bell" {
		g.Bell(args[1])
		return 0
	}
	err := g.run(ctx, version, args, in, out)
	if err == nil {
		return 0
	}
	fmt.Fprintf(errs, "agent-guest: %v\n", err)
	if hint := fail.HintOf(err); hint != "" {
		fmt.Fprintf(errs, "hint: %s\n", hint)
	}
	return int(fail.CodeOf(err))
}

func (g Guest) run(ctx context.Context, version string, args []string, in io.Reader, out io.Writer) error {
	if len(args) == 0 {
		return fail.New(fail.Usage, "no command\n%s", usage)
	}
	name, rest := args[0], args[1:]
	if name == "home" { // home parses its own options
		return g.Home(rest, in, out, os.Stderr)
	}
	if name == "task" { // task does too
		return g.Task(ctx, rest, in, out)
	}
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	var l logOptions
	var wipe bool
	var watched watchOptions
	switch name {
	case "log":
		flags.Int64Var(&l.since, "since", -1, "")
		flags.IntVar(&l.limit, "limit", 0, "")
		flags.BoolVar(&l.follow, "follow", false, "")
	case "secrets":
		flags.BoolVar(&wipe, "wipe", false, "")
	case "watch":
		flags.StringVar(&watched.dir, "dir", "", "")
		flags.StringVar(&watched.base, "base", "", "")
	}
	if err := flags.Parse(rest); err != nil {
		return fail.New(fail.Usage, "%s: %w\n%s", name, err, usage)
	}
	if want := map[string]int{"credential": 1, "hostname": 1}[name]; flags.NArg() != want {
		return fail.New(fail.Usage, "%s: takes %d arguments\n%s", name, want, usage)
	}
	switch name {
	case "install":
		return printStatus(out)(g.Install(ctx, in))
	case "policy":
		return printStatus(out)(g.SetPolicy(ctx, in))
	case "status":
		return printStatus(out)(g.askDaemon(ctx, "status"))
	case "stop":
		_, err := g.askDaemon(ctx, "stop")
		return err
	case "log":
		return g.printLog(ctx, out, l)
	case "secrets":
		if wipe {
			return g.WipeSecrets()
		}
		return g.SetSecrets(in)
	case "hostname":
		return g.SetHostname(flags.Arg(0))
	case "credential":
		return g.Credential(flags.Arg(0), in, out)
	case "watch":
		frugal()
		return g.Watch(ctx, watched, in, out)
	case "daemon":
		reload := make(chan os.Signal, 1)
		signal.Notify(reload, syscall.SIGHUP)
		defer signal.Stop(reload)
		return g.Daemon(ctx, version, reload, sync.OnceFunc(func() { notifySystemd(ctx) }))
	case "lockdown":
		return g.Lockdown(ctx)
	case "seed":
		return g.Seed(ctx, sync.OnceFunc(func() { notifySystemd(ctx) }))
	case "sleep":
		return g.Sleep(ctx)
	case "unit":
		_, err := io.WriteString(out, unit)
		return err
	case "version":
		_, err := fmt.Fprintln(out, version)
		return err
	}
	return fail.New(fail.Usage, "unknown command %q\n%s", guestproto.Clean(name), usage)
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

// notifySystemd reports that the firewall is active, so that systemd may start the
// network.
func notifySystemd(ctx context.Context) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "unixgram", path)
	if err != nil {
		return // systemd's own timeout reports the failure then
	}
	_, err = io.WriteString(c, "READY=1")
	_ = errors.Join(err, c.Close())
}
