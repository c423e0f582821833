package golden

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// VMs runs VMs that belong to no session, each behind a gateway of its own.
type VMs struct {
	Driver vm.Driver
	Self   string // path of this program's binary, which also runs the gateway
}

// clear removes the gateway and the VM that were used for the work in a directory. The gateway is
// first, because its sockets are in the VM's directory.
func (v VMs) clear(ctx context.Context, name, work string) error {
	return errors.Join(v.gateway(work).Stop(ctx), v.Driver.Delete(ctx, name))
}

func (v VMs) gateway(work string) gateway.Process {
	return gateway.Process{Dir: filepath.Join(work, GatewayFolder), Self: v.Self}
}

// booted is a running VM that belongs to no session, with a login to it.
type booted struct {
	driver     vm.Driver
	name       string
	private    []byte // key of the login
	authorized string // the public half
	endpoint   vm.Endpoint
	guest      guestclient.Guest
}

// boot creates and starts a VM behind a gateway with a policy, and logs in to it.
func (v VMs) boot(ctx context.Context, spec vm.Spec, work string, pol *policy.Policy, p vm.Progress) (*booted, error) {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	private, authorized, err := ssh.NewKey()
	if err != nil {
		return nil, err
	}
	b := &booted{driver: v.Driver, name: spec.Name, private: private, authorized: authorized}
	if err := v.Driver.Delete(ctx, b.name); err != nil {
		return nil, err
	}
	spec.User, spec.AuthorizedKey, spec.Boot, spec.ExternalNet = guestclient.User, authorized, guestclient.BootScript(), true
	if err := v.Driver.Create(ctx, spec); err != nil {
		return nil, err
	}
	for panicked := false; ; panicked = true {
		if err := v.startGateway(ctx, b.name, work, pol); err != nil {
			return nil, err
		}
		b.endpoint, err = v.Driver.Start(ctx, b.name, p)
		if err == nil {
			break
		}
		if panicked || !errors.Is(err, vm.ErrPanicked) {
			return nil, err
		}
		report(p, "%v, starting again", vm.ErrPanicked)
	}
	machine, err := v.Driver.Inspect(ctx, b.name)
	if err != nil {
		return nil, err
	}
	b.guest.Root = machine.Root
	b.guest.SSH, err = ssh.DialBooted(ctx, ssh.Target{Addr: b.endpoint.Addr, User: b.endpoint.User, Key: private, HostKey: b.endpoint.HostKey},
		func() error {
			report(p, "waiting for the guest's network")
			if machine, err := v.Driver.Inspect(ctx, b.name); err == nil && machine.State != vm.Running {
				return fail.New(fail.Failure, "the VM stopped before it accepted a login")
			}
			return nil
		})
	if err != nil {
		return nil, err
	}
	st, err := b.guest.Install(ctx, spec.Image.Arch, "", pol)
	if err == nil && !st.Ready() {
		err = fail.New(fail.Policy, "the guest firewall is not running: %s %s", st.Firewall.Error, st.DNS.Error)
	}
	if err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

func (v VMs) startGateway(ctx context.Context, name, work string, pol *policy.Policy) error {
	sockets, err := v.Driver.NetSockets(name)
	if err != nil {
		return err
	}
	g := v.gateway(work)
	if err := g.Stop(ctx); err != nil { // of the previous VM
		return err
	}
	return g.Start(ctx, sockets, pol)
}

// shutdown waits until the guest has shut itself down. A disk whose guest must be killed
// does not become an image.
func (b *booted) shutdown(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, haltTimeout, fail.New(fail.Timeout, "the guest did not power off within %v", haltTimeout))
	defer cancel()
	_ = b.guest.Poweroff(ctx) // shutting down ends the connection
	b.close()
	for {
		machine, err := b.driver.Inspect(ctx, b.name)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return err
		case machine.State == vm.Stopped:
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(statePoll):
		}
	}
}

func (b *booted) close() {
	if b.guest.SSH != nil {
		_ = b.guest.SSH.Close() // already closed, by an earlier call or by the guest
	}
}
