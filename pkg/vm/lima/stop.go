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
	qmpTimeout = 5 * time.Second // for one exchange with QEMU's monitor
	qmpPoll    = 5 * time.Millisecond
)

// Stop implements vm.Driver. Lima only presses an ACPI power button. The press is
// lost when the guest does not listen for it yet, and Lima then takes three minutes.
// Stop uses the power button only when the guest cannot be asked.
func (d *Driver) Stop(ctx context.Context, name string, poweroff func(context.Context) error, grace time.Duration) error {
	dir, err := d.dir(name)
	if err != nil {
		return err
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return notFound(name)
	}
	r, err := survivors(dir)
	if err != nil {
		return err
	}
	if r.driver && poweroff != nil && grace > 0 {
		if err := powerOff(ctx, dir, poweroff, grace); err != nil {
			return err
		}
	}
	if err := kill(ctx, dir); err != nil {
		return fmt.Errorf("stop VM %s: %w", name, err)
	}
	return nil
}

// powerOff asks the guest to power off and waits for the VM to end, at most for
// grace. It returns an error only if the caller's ctx is cancelled: after any other
// failure the caller cuts the power.
func powerOff(ctx context.Context, dir string, poweroff func(context.Context) error, grace time.Duration) error {
	bounded, cancel := context.WithTimeout(ctx, grace)
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		// The error says little, because a guest that powers off breaks the very
		// connection of the request. Pressing the button in addition is harmless.
		if poweroff(bounded) == nil {
			return
		}
		// Repeat it: a guest that has just booted or resumed a snapshot may not watch
		// the button yet.
		for first := true; ; first = false {
			err := pressPowerButton(bounded, dir)
			if err != nil && first {
				logrus.WithError(err).Warn("pressing the power button failed")
			}
			if err != nil || sleep(bounded, buttonEvery) != nil {
				return
			}
		}
	}()
	defer func() { cancel(); <-asked }()

	// Not by pid files: a QEMU that has just started has none yet.
	until, err := survivors(dir)
	for err == nil && until.driver && sleep(bounded, processPoll) == nil {
		until, err = survivors(dir)
	}
	lingering, cancelLingering := context.WithTimeout(ctx, agentGrace)
	defer cancelLingering()
	for err == nil && !until.driver && until.agent && sleep(lingering, processPoll) == nil {
		until, err = survivors(dir)
	}
	return errors.Join(err, ctx.Err())
}

// buttonEvery is how often the power button is pressed until the guest ends.
const buttonEvery = 2 * time.Second

// pressPowerButton asks QEMU for an ACPI power button event. If QEMU is missing or
// stuck, the caller cuts the power.
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
