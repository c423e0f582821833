package lima

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"
)

// agentGrace is how long a host agent may take to notice that its VM is gone.
const agentGrace = 5 * time.Second

// Stop implements vm.Driver. Lima's own way, an ACPI power button, is lost
// when the guest is not listening yet and then takes three minutes.
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
		// Its error says little: a guest that powers off breaks the very
		// connection the request came by.
		_ = poweroff(bounded)
	}()
	defer func() { cancel(); <-asked }()

	m, err := readMeta(dir)
	if err != nil {
		return nil // broken; killing needs no meta
	}
	until := look(dir, m)
	for until.driver && sleep(bounded, processPoll) == nil {
		until = look(dir, m)
	}
	if until.driver {
		return ctx.Err()
	}
	lingering, cancelLingering := context.WithTimeout(ctx, agentGrace)
	defer cancelLingering()
	for look(dir, m).agent && sleep(lingering, processPoll) == nil {
	}
	return ctx.Err()
}
