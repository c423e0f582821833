package lima

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/lima-vm/lima/pkg/store/filenames"
	"github.com/sirupsen/logrus"
)

// agentGrace is how long a host agent may take to notice that its VM is gone.
const agentGrace = 5 * time.Second

// qmpTimeout bounds the talk with QEMU's monitor.
const qmpTimeout = 5 * time.Second

// Stop implements vm.Driver. Lima's own way, an ACPI power button, is lost
// when the guest is not listening yet and then takes three minutes. It is what
// remains when the guest cannot be asked.
func (d *Driver) Stop(ctx context.Context, name string, poweroff func(context.Context) error, grace time.Duration) error {
	dir, err := d.dir(name)
	if err != nil {
		return err
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return notFound(name)
	}
	r, err := d.survivors(dir)
	if err != nil {
		return err
	}
	if r.driver && poweroff != nil && grace > 0 {
		if err := d.powerOff(ctx, dir, poweroff, grace); err != nil {
			return err
		}
	}
	if err := d.kill(ctx, dir); err != nil {
		return fmt.Errorf("stop VM %s: %w", name, err)
	}
	return nil
}

// powerOff asks the guest to power off and waits for the VM to end, at most
// for grace. Only the caller's cancelled ctx is an error: whatever else goes
// wrong, the plug is pulled next.
func (d *Driver) powerOff(ctx context.Context, dir string, poweroff func(context.Context) error, grace time.Duration) error {
	bounded, cancel := context.WithTimeout(ctx, grace)
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		// Its error says little, as a guest that powers off breaks the very
		// connection the request came by; pressing the button as well is harmless.
		if poweroff(bounded) == nil {
			return
		}
		if err := pressPowerButton(bounded, dir); err != nil {
			logrus.WithError(err).Warn("cannot press the power button")
		}
	}()
	defer func() { cancel(); <-asked }()

	// Not by pid files: a QEMU that has just started has none yet.
	until, err := d.survivors(dir)
	for err == nil && until.driver && sleep(bounded, processPoll) == nil {
		until, err = d.survivors(dir)
	}
	lingering, cancelLingering := context.WithTimeout(ctx, agentGrace)
	defer cancelLingering()
	for err == nil && !until.driver && until.agent && sleep(lingering, processPoll) == nil {
		until, err = d.survivors(dir)
	}
	return errors.Join(err, ctx.Err())
}

// pressPowerButton asks QEMU for an ACPI power button event, over its machine
// protocol: https://www.qemu.org/docs/master/interop/qmp-spec.html. There may be
// no QEMU, or one that is stuck: the plug is pulled then.
func pressPowerButton(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, qmpTimeout)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, filenames.QMPSock))
	if err != nil {
		return err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	in, out := json.NewDecoder(c), json.NewEncoder(c)
	var greeting struct{ QMP json.RawMessage }
	if err := in.Decode(&greeting); err != nil {
		return err
	}
	for _, command := range []string{"qmp_capabilities", "system_powerdown"} {
		if err := out.Encode(map[string]string{"execute": command}); err != nil {
			return err
		}
		for answered := false; !answered; {
			var reply struct {
				Return, Error, Event json.RawMessage
			}
			if err := in.Decode(&reply); err != nil {
				return err
			}
			if reply.Error != nil {
				return fmt.Errorf("%s: %s", command, reply.Error)
			}
			answered = reply.Return != nil
		}
	}
	return nil
}
