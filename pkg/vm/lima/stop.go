package lima

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/sirupsen/logrus"
)

// agentGrace is how long a host agent may take to notice that its VM is gone.
const agentGrace = 5 * time.Second

const (
	qmpTimeout = 5 * time.Second // for a word with QEMU's monitor
	qmpPoll    = 5 * time.Millisecond
)

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
		// Again and again: a guest that has just booted, or gone on from a saved
		// state, has nobody yet who watches the button.
		for first := true; ; first = false {
			err := pressPowerButton(bounded, dir)
			if err != nil && first {
				logrus.WithError(err).Warn("cannot press the power button")
			}
			if err != nil || sleep(bounded, buttonEvery) != nil {
				return
			}
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

// buttonEvery is how often the power button is pressed until the guest ends.
const buttonEvery = 2 * time.Second

// pressPowerButton asks QEMU for an ACPI power button event. There may be no
// QEMU, or one that is stuck: the plug is pulled then.
func pressPowerButton(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, qmpTimeout)
	defer cancel()
	m, err := dialMonitor(ctx, dir)
	if err != nil {
		return err
	}
	defer m.Close()
	_, err = m.do("system_powerdown", nil)
	return err
}
