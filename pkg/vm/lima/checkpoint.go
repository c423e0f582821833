package lima

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// A checkpoint of a running QEMU is made in these steps. A process may die after each; the next
// call finds out how far it came.
//
//  1. QEMU writes memory and devices to a file, and pauses the VM for the last part of them.
//  2. QEMU changes to a new disk, an overlay of the present one, which is then a layer.
//  3. The new disk's file gets another name, which shows that it is the VM's disk.
//  4. The VM runs again.
//  5. That name becomes the name of the VM's disk.
//  6. The checkpoint is flushed, and gets its description.
//
// QEMU opens a file again, by the name that it knows, when it needs other access to it: in step 4,
// both disks, and at the next checkpoint, the new one. Until the VM has ended, these names stay.
//
// All files are in the VM's directory, and a disk names the layer below it without a directory.

const (
	checkpointPrefix = "agent-sessionizer-checkpoint-" // and the id: its description, which makes it complete
	statePrefix      = "agent-sessionizer-state-"      // and the id: memory and devices
	layerPrefix      = "agent-sessionizer-layer-"      // and the id: the disk
	nextPrefix       = "agent-sessionizer-next-"       // and the id: the new disk, as QEMU knows it until the VM ends
	switchPrefix     = "agent-sessionizer-switch-"     // and the id: the new disk, until it has the name of the VM's disk
	newPrefix        = "agent-sessionizer-new-"        // and the id: a disk that is being made for a VM that does not run

	// liveTime is how long the memory is written while the VM runs, once at most. Then a guest that
	// changes its memory faster than it is written is paused for the rest.
	liveTime = 30 * time.Second

	settleTimeout = 30 * time.Second

	// maxLayers limits how many layers a disk has. More would slow it down.
	maxLayers = 8
)

var checkpointID = lazyregexp.New(`^[0-9a-z][0-9a-z-]{0,31}$`)

var _ vm.Checkpointer = (*Driver)(nil)

// checkpoint is one checkpoint of the VM in dir.
type checkpoint struct {
	dir, id string
	reached func(step string) // called after each step; a test interrupts it
}

// description is the content of a checkpoint's file.
type description struct {
	vm.Checkpoint
	Key     string `json:"key,omitempty"` // of Driver.StateKey
	HostKey string `json:"host_key,omitempty"`
}

func (c checkpoint) path(prefix string) string { return filepath.Join(c.dir, prefix+c.id) }
func (c checkpoint) diffDisk() string          { return filepath.Join(c.dir, filenames.DiffDisk) }

// checkpoint returns the checkpoint of an existing VM.
func (d *Driver) checkpoint(name, id string) (checkpoint, meta, error) {
	dir, err := d.dir(name)
	if err != nil {
		return checkpoint{}, meta{}, err
	}
	if !checkpointID.MatchString(id) {
		return checkpoint{}, meta{}, fail.New(fail.Usage, "checkpoint %q: an id has up to 32 of the characters 0-9, a-z and -", id)
	}
	m, err := readMeta(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = notFound(name)
	}
	return checkpoint{dir, id, d.reached}, m, err
}

func (c checkpoint) step(name string) {
	if c.reached != nil {
		c.reached(name)
	}
}

func (c checkpoint) read() (is description, err error) {
	b, err := os.ReadFile(c.path(checkpointPrefix))
	if err == nil {
		err = json.Unmarshal(b, &is)
	}
	return is, err
}

// Checkpoint implements vm.Checkpointer.
func (d *Driver) Checkpoint(ctx context.Context, name, id string, p vm.Progress) (vm.Checkpoint, error) {
	c, m, err := d.checkpoint(name, id)
	if err != nil {
		return vm.Checkpoint{}, err
	}
	is, err := c.read()
	if errors.Is(err, fs.ErrNotExist) {
		var runs bool
		if runs, err = c.runs(); err == nil && runs {
			is, err = d.keep(ctx, c, m, true, p)
		} else if err == nil {
			is, err = c.keepStopped(ctx, m)
		}
	}
	if err != nil {
		return vm.Checkpoint{}, fmt.Errorf("checkpoint of VM %s: %w", name, explainOS(err))
	}
	return is.Checkpoint, nil
}

// Suspend implements vm.Checkpointer.
func (d *Driver) Suspend(ctx context.Context, name, id string, p vm.Progress) (vm.Checkpoint, error) {
	c, m, err := d.checkpoint(name, id)
	if err != nil {
		return vm.Checkpoint{}, err
	}
	is, err := d.suspend(ctx, c, m, p)
	if err != nil {
		return vm.Checkpoint{}, fmt.Errorf("suspend VM %s: %w", name, explainOS(err))
	}
	return is.Checkpoint, nil
}

func (d *Driver) suspend(ctx context.Context, c checkpoint, m meta, p vm.Progress) (is description, err error) {
	if m.VMType == limayaml.VZ {
		return is, vm.ErrNoMemory
	}
	runs, err := c.runs()
	if err != nil {
		return is, err
	}
	if runs {
		is, err = d.keep(ctx, c, m, false, p)
	} else if is, err = c.read(); errors.Is(err, fs.ErrNotExist) {
		err = fail.New(fail.Conflict, "it does not run")
	}
	if err != nil {
		return is, err
	}
	if err := kill(ctx, c.dir); err != nil {
		return is, err
	}
	return is, d.restore(ctx, c, m, true)
}

// runs reports whether the VM runs, or is paused.
func (c checkpoint) runs() (bool, error) {
	r, err := survivors(c.dir)
	return r.driver, err
}

// keepStopped makes the checkpoint of a VM that does not run: it gets an overlay of its disk.
func (c checkpoint) keepStopped(ctx context.Context, m meta) (is description, err error) {
	if exists(filepath.Join(c.dir, forkFile)) {
		return is, fail.New(fail.Conflict, "it is suspended; start it first")
	}
	if m.VMType == limayaml.VZ {
		return is, c.copyDisk(&is)
	}
	if err := errors.Join(tidyDisks(c.dir), c.discard()); err != nil {
		return is, err
	}
	layers, err := layersOf(c.dir, filenames.DiffDisk)
	if err != nil {
		return is, err
	}
	if !slices.Contains(layers, layerPrefix+c.id) { // otherwise an earlier call came this far
		if err := os.Link(c.diffDisk(), c.path(layerPrefix)); err != nil {
			return is, err
		}
		if err := c.replaceDisk(ctx); err != nil {
			return is, err
		}
	}
	return is, c.describe(&is)
}

// copyDisk makes a checkpoint of a VM of vz, whose disk has no layers.
func (c checkpoint) copyDisk(is *description) error {
	tmp := c.path(newPrefix)
	if err := clone(c.diffDisk(), tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, c.path(layerPrefix)); err != nil {
		return err
	}
	return c.describe(is)
}

// keep makes the checkpoint of a running VM, and lets the VM go on or leaves it paused.
func (d *Driver) keep(ctx context.Context, c checkpoint, m meta, goOn bool, p vm.Progress) (is description, err error) {
	e, err := readEndpoint(c.dir)
	if err != nil {
		return is, fail.New(fail.Conflict, "it is still starting")
	}
	is.HostKey = e.HostKey
	if m.VMType == limayaml.VZ {
		report(p, "copying the disk")
		return is, c.copyDisk(&is)
	}
	if is.Key, err = d.StateKey(ctx, m.Arch, m.CPUs, m.Memory); err != nil {
		return is, err
	}
	is.Memory = true
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	q, err := dialMonitor(ctx, c.dir)
	if err != nil {
		return is, err
	}
	defer q.Close()
	active, err := settle(q, c.dir)
	if err != nil {
		return is, err
	}
	switch {
	case active != c.id:
		var accel vm.Accel
		if accel, err = d.accel.find(ctx, m.Arch); err != nil {
			return is, err
		}
		if err = errors.Join(removeFile(c.path(nextPrefix)), c.discard()); err == nil {
			is.Pause, err = c.take(ctx, q, m.Memory, goOn && accel.Name != "tcg", goOn, p)
		}
	case !goOn:
		err = fail.New(fail.Conflict, "it ran after the checkpoint %s was made", c.id)
	} // otherwise only the description is missing
	if err == nil {
		c.step("final name")
		report(p, "writing the checkpoint to the disk")
		err = c.describe(&is)
	}
	if err != nil {
		_ = q.Close() // QEMU serves one connection, and this one may have ended with ctx
		err = errors.Join(err, c.abandon(ctx))
	}
	return is, err
}

// Settle implements vm.Checkpointer.
func (d *Driver) Settle(ctx context.Context, name string) error {
	dir, err := d.dir(name)
	if err != nil {
		return err
	}
	m, err := readMeta(dir)
	if err != nil || m.VMType == limayaml.VZ {
		return nil //nolint:nilerr // nothing runs
	}
	if r := readProcesses(dir, m); !r.driver {
		return nil
	}
	left, err := unsettled(dir)
	if !left || err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	q, err := dialMonitor(ctx, dir)
	if err != nil {
		return err
	}
	defer q.Close()
	_, err = settle(q, dir)
	return err
}

// unsettled reports whether a process may have died while it made a checkpoint of the VM in dir.
func unsettled(dir string) (bool, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		id, next := strings.CutPrefix(e.Name(), nextPrefix)
		if strings.HasPrefix(e.Name(), switchPrefix) || next && !exists(checkpoint{dir: dir, id: id}.path(checkpointPrefix)) {
			return true, nil
		}
	}
	return false, nil
}

// take writes the memory, live while the VM runs or with the VM paused, and gives the VM another
// disk. It returns how long the VM was paused.
//
// Emulation must be paused: QEMU marks a page as changed before it changes it, and may copy the page
// in between. Live copies of emulated guests crashed after they resumed.
func (c checkpoint) take(ctx context.Context, q *monitor, memory int64, live, goOn bool, p vm.Progress) (pause time.Duration, err error) {
	layers, err := layersOf(c.dir, filenames.DiffDisk)
	if err == nil && len(layers) >= 4*maxLayers {
		err = fail.New(fail.Conflict, "its disk has %d layers of earlier checkpoints; they are merged when it starts", len(layers))
	}
	if err != nil {
		return 0, err
	}
	size, _, err := readDisk(c.diffDisk())
	if err != nil {
		return 0, err
	}
	if err := os.Link(c.diffDisk(), c.path(layerPrefix)); err != nil {
		return 0, err
	}
	// Unchecked (-u), because QEMU holds a lock on the layer.
	if err := qemuImg(ctx, "create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", layerPrefix+c.id, c.path(nextPrefix), fmt.Sprint(size)); err != nil {
		return 0, err
	}
	if err := os.Chmod(c.path(nextPrefix), 0o600); err != nil {
		return 0, err
	}
	c.step("new disk")
	report(p, "writing the memory")
	began := time.Now()
	var stopped time.Time // unless QEMU itself pauses the VM
	if !live {
		stopped = began
		if _, err := q.do("stop", nil); err != nil {
			return 0, err
		}
	}
	var last migration
	err = q.migrate(ctx, c.path(statePrefix), func(now migration) error {
		if last = now; now.Status == "active" && stopped.IsZero() && (time.Since(began) > liveTime || now.RAM.Transferred > memory) {
			stopped = time.Now()
			_, err := q.do("stop", nil)
			return err
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	c.step("memory")
	if stopped.IsZero() {
		stopped = time.Now().Add(-time.Duration(last.Downtime) * time.Millisecond)
	}
	_, err = q.do("blockdev-snapshot-sync", map[string]any{"device": bootDisk, "snapshot-file": c.path(nextPrefix), "format": "qcow2", "mode": "existing"})
	if err != nil {
		return 0, err
	}
	c.step("change of disks")
	if err := c.proceed(nil); err != nil || !goOn {
		return 0, err
	}
	c.step("name")
	err = c.proceed(q)
	return time.Since(stopped), err
}

// proceed makes a VM run that QEMU has given its next disk. Without a monitor it only prepares that.
func (c checkpoint) proceed(q *monitor) error {
	if _, err := os.Lstat(c.path(switchPrefix)); errors.Is(err, fs.ErrNotExist) {
		next, err1 := os.Stat(c.path(nextPrefix))
		now, err2 := os.Stat(c.diffDisk())
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if !os.SameFile(next, now) { // otherwise an earlier call has completed this
			if err := errors.Join(os.Link(c.path(nextPrefix), c.path(switchPrefix)), syncDir(c.dir)); err != nil {
				return err
			}
		}
	}
	if q == nil {
		return nil
	}
	if err := q.goOn(); err != nil {
		return err
	}
	c.step("running")
	err := os.Rename(c.path(switchPrefix), c.diffDisk())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// abandon makes the VM run after keep failed, and removes what it made.
func (c checkpoint) abandon(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	q, err := dialMonitor(ctx, c.dir)
	if err != nil {
		return err
	}
	defer q.Close()
	active, err := settle(q, c.dir)
	if err == nil && active != c.id {
		err = removeFile(c.path(nextPrefix))
	}
	return errors.Join(err, c.discard())
}

// settle completes the change to another disk if a process died before it had done that, ends what
// QEMU still does for such a process, and makes the VM run. It returns the id of the checkpoint that
// gave the VM its present disk, "" for none since the VM started.
func settle(q *monitor, dir string) (active string, err error) {
	if _, err := q.do("migrate_cancel", nil); err != nil { // does nothing if none is active
		return "", err
	}
	var devices []struct {
		Device   string
		Inserted struct{ File string }
	}
	if err := q.ask("query-block", &devices); err != nil {
		return "", err
	}
	for _, b := range devices {
		if b.Device == bootDisk {
			active, _ = strings.CutPrefix(fileOf(b.Inserted.File), filepath.Join(dir, nextPrefix))
		}
	}
	if strings.Contains(active, "/") { // the disk with which the VM was started
		return "", q.goOn()
	}
	return active, checkpoint{dir: dir, id: active}.proceed(q)
}

// goOn runs a VM that is paused.
func (m *monitor) goOn() error {
	var is struct{ Running bool }
	err := m.ask("query-status", &is)
	if err == nil && !is.Running {
		_, err = m.do("cont", nil)
	}
	return err
}

// describe flushes the checkpoint and writes its description.
func (c checkpoint) describe(is *description) error {
	files := []string{c.path(layerPrefix)}
	if is.Memory {
		files = append(files, c.path(statePrefix))
	}
	for _, f := range files {
		if err := flush(f); err != nil {
			return err
		}
		size, _ := used(f)
		is.Size += size
	}
	b, err := json.Marshal(is)
	if err != nil {
		return err
	}
	return atomicfile.Write(c.path(checkpointPrefix), b, 0o600)
}
