package netguard

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// Paths of the network guard.
const (
	unitFile = "/etc/systemd/system/agent-guest.service"
	unitName = "agent-guest.service"

	unitWanted = "/etc/systemd/system/sysinit.target.wants/" + unitName // the unit is enabled
	etcDir     = "/etc/agent-guest"
	stateDir   = "/run/agent-guest"
	policyIn   = etcDir + "/policy.json"
	upstreams  = etcDir + "/upstream" // resolvers, one address[:port] per line; overrides those from DHCP
	resolvOld  = etcDir + "/resolv.conf.orig"
	socketIn   = "control.sock"
)

// installTime bounds the wait for the guest firewall to become active.
const installTime = 10 * time.Minute

// Unit starts the daemon before the network is up. The service may do little more
// than change packet filters and write to /etc and /run.
const Unit = `[Unit]
Description=Network policy of this agent's VM
DefaultDependencies=no
RequiresMountsFor=/usr/local/bin /etc
After=systemd-remount-fs.service systemd-sysctl.service systemd-modules-load.service
Wants=network-pre.target
Before=network-pre.target docker.service containerd.service shutdown.target
Conflicts=shutdown.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart=/usr/local/bin/agent-guest daemon
ExecReload=/bin/kill -HUP $MAINPID
Restart=always
RestartSec=1
TimeoutStartSec=60
RuntimeDirectory=agent-guest
RuntimeDirectoryMode=0755
RuntimeDirectoryPreserve=yes
OOMScoreAdjust=-900
MemoryMax=192M
TasksMax=256
NoNewPrivileges=yes
CapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW CAP_NET_BIND_SERVICE CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER
RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK AF_UNIX
ProtectSystem=strict
ReadWritePaths=/etc /run
ProtectHome=yes
ProtectControlGroups=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native

[Install]
WantedBy=sysinit.target
`

// Install puts the program, its unit and a policy in place, starts the daemon, and
// returns its status once the guest firewall is active. It may be repeated.
func Install(ctx context.Context, g sys.Guest, in io.Reader) (guestproto.Status, error) {
	if err := g.NeedRoot("install"); err != nil {
		return guestproto.Status{}, err
	}
	if err := writePolicy(g, in); err != nil {
		return guestproto.Status{}, err
	}
	start := startUnit
	if g.Fake {
		start = startProcess
	} else if unitRuns(ctx, g) {
		// This is the case in a golden image, where a restart would take seconds.
		if s, err := Ask(ctx, g, "reload"); err == nil && s.Ready() {
			return s, nil
		}
	}
	if err := start(ctx, g); err != nil {
		return guestproto.Status{}, err
	}
	return waitReady(ctx, g)
}

// SetPolicy replaces the policy of a running daemon. A bad policy changes nothing.
func SetPolicy(ctx context.Context, g sys.Guest, in io.Reader) (guestproto.Status, error) {
	if err := g.NeedRoot("policy"); err != nil {
		return guestproto.Status{}, err
	}
	if err := writePolicy(g, in); err != nil {
		return guestproto.Status{}, err
	}
	return Ask(ctx, g, "reload")
}

func writePolicy(g sys.Guest, in io.Reader) error {
	data, err := io.ReadAll(io.LimitReader(in, policy.MaxBytes+1))
	if err != nil {
		return fmt.Errorf("read the policy: %w", err)
	}
	if _, err := policy.Unmarshal(data); err != nil {
		return fail.New(fail.Policy, "the policy was rejected, the previous one stays in force: %w", err)
	}
	return sys.WriteFile(g.Path(policyIn), data, 0o644)
}

// unitRuns reports whether the running daemon is this very executable, started by
// this unit. It starts the unit first if no daemon answers, because the boot may
// not have reached it yet.
func unitRuns(ctx context.Context, g sys.Guest) bool {
	if _, err := os.Lstat(g.Path(unitWanted)); err != nil || sys.Text(g.Path(unitFile)) != Unit {
		return false
	}
	ours, err1 := os.Stat("/proc/self/exe")
	kept, err2 := os.Stat(g.Path(sys.Binary))
	if errors.Join(err1, err2) != nil || !os.SameFile(ours, kept) {
		return false
	}
	pid, err := daemonPID(ctx, g)
	if err != nil {
		if _, err := sys.Run(ctx, "", "systemctl", "start", unitName); err != nil {
			return false
		}
		if pid, err = daemonPID(ctx, g); err != nil {
			return false
		}
	}
	theirs, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	return err == nil && os.SameFile(ours, theirs)
}

func startUnit(ctx context.Context, g sys.Guest) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if self != g.Path(sys.Binary) {
		program, err := os.ReadFile(self)
		if err != nil {
			return err
		}
		if err := sys.WriteFile(g.Path(sys.Binary), program, 0o755); err != nil {
			return err
		}
	}
	if err := sys.WriteFile(g.Path(unitFile), []byte(Unit), 0o644); err != nil {
		return err
	}
	// enable reloads systemd's units, as daemon-reload does.
	for _, args := range [][]string{{"enable", "--quiet", unitName}, {"restart", unitName}} {
		if _, err := sys.Run(ctx, "", "systemctl", args...); err != nil {
			return fail.New(fail.Failure, "start the guest agent: %w", err).WithHint("journalctl -u agent-guest")
		}
	}
	return nil
}

// startProcess runs the daemon of a fake guest, or makes the running one reload.
func startProcess(ctx context.Context, g sys.Guest) error {
	if _, err := Ask(ctx, g, "reload"); err == nil || fail.CodeOf(err) != fail.NotFound {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(g.Path(stateDir), 0o755); err != nil {
		return err
	}
	out, err := os.OpenFile(filepath.Join(g.Path(stateDir), "daemon.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	// The daemon outlives this command, as a real one does.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), self, "daemon")
	cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+g.Root)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the daemon: %w", err)
	}
	return cmd.Process.Release()
}

func waitReady(ctx context.Context, g sys.Guest) (guestproto.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, installTime)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		s, err := Ask(ctx, g, "status")
		if err == nil && s.Ready() {
			return s, nil
		}
		select {
		case <-ctx.Done():
			why := errors.Join(err, ctx.Err())
			if err == nil {
				why = fmt.Errorf("firewall %q, DNS %q", s.Firewall.Error, s.DNS.Error)
			}
			return s, fail.New(fail.Failure, "the guest firewall is not running: %w", why).WithHint("journalctl -u agent-guest")
		case <-tick.C:
		}
	}
}
