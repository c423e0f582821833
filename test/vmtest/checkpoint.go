package vmtest

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// counter is a program that shows whether the guest's memory goes on: it counts in a variable.
const counter = `nohup sh -c 'n=0; while :; do n=$((n+1)); echo $n >/dev/shm/vmtest.new; mv /dev/shm/vmtest.new /dev/shm/vmtest; sleep 0.1; done' >/dev/null 2>&1 </dev/null & sleep 1`

// checkpoints goes through the life of two checkpoints of a running VM, which runs afterwards. It
// returns a connection to it.
func (h Harness) checkpoints(t *testing.T, d vm.Driver, ep vm.Endpoint, c *ssh.Client) *ssh.Client {
	t.Helper()
	k, ok := d.(vm.Checkpointer)
	if !ok {
		return c
	}
	count := func() int {
		t.Helper()
		n, err := strconv.Atoi(output(t, c, "cat /dev/shm/vmtest"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	goesOn := func(least int) {
		t.Helper()
		if !h.Real {
			return
		}
		n := count()
		if n < least {
			t.Errorf("the program in the guest counted to %d, want at least %d", n, least)
		}
		for end := time.Now().Add(time.Minute); count() <= n; time.Sleep(100 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("the program in the guest does not go on after %d", n)
			}
		}
	}
	resumed := func(id string, memory bool) {
		t.Helper()
		if err := k.Restore(t.Context(), alive, id, memory); err != nil {
			t.Fatalf("Restore(%s, %t) = %v, want nil", id, memory, err)
		}
		was := ep
		ep = h.start(t, d)
		if ep.HostKey != was.HostKey {
			t.Errorf("host key after Restore = %s, want %s", ep.HostKey, was.HostKey)
		}
		c = h.dial(t, ep)
	}
	if h.Real {
		output(t, c, counter)
	}
	output(t, c, "echo first >~/checkpoint; sync")
	goesOn(1)
	for range 2 { // the second call changes nothing
		is, err := k.Checkpoint(t.Context(), alive, "first", func(msg string) { t.Log(msg) })
		if err != nil || is.Size == 0 || !is.Memory {
			t.Fatalf("Checkpoint = %+v, %v, want memory and disk", is, err)
		}
		t.Logf("checkpoint: %+v", is)
	}
	goesOn(1)
	if err := k.Restore(t.Context(), alive, "first", true); err == nil {
		t.Error("Restore of a VM that runs = nil, want an error")
	}
	output(t, c, "echo second >~/checkpoint; sync")
	counted := 0
	if h.Real {
		counted = count()
	}
	if _, err := k.Suspend(t.Context(), alive, "second", nil); err != nil {
		t.Fatalf("Suspend = %v, want nil", err)
	}
	if m, err := d.Inspect(t.Context(), alive); err != nil || m.State != vm.Stopped {
		t.Errorf("Inspect after Suspend = %+v, %v, want %s", m, err, vm.Stopped)
	}
	if _, err := k.Suspend(t.Context(), alive, "second", nil); err != nil { // of a process that died meanwhile
		t.Errorf("Suspend again = %v, want nil", err)
	}

	// Back to the first, and forward to the second.
	resumed("first", true)
	if got := output(t, c, "cat ~/checkpoint"); got != "first" {
		t.Errorf("file after Restore(first) = %q, want first", got)
	}
	goesOn(1)
	if err := d.Stop(t.Context(), alive, nil, 0); err != nil {
		t.Fatal(err)
	}
	resumed("second", true)
	if got := output(t, c, "cat ~/checkpoint"); got != "second" {
		t.Errorf("file after Restore(second) = %q, want second", got)
	}
	goesOn(counted)

	// Without its memory, the VM boots.
	if err := d.Stop(t.Context(), alive, nil, 0); err != nil {
		t.Fatal(err)
	}
	resumed("first", false)
	if got := output(t, c, "cat ~/checkpoint"); got != "first" {
		t.Errorf("file after Restore(first) without memory = %q, want first", got)
	}
	c2 := h.forked(t, d, k, ep)
	defer c2.Close()
	for _, id := range []string{"first", "second", "third"} {
		if err := k.RemoveCheckpoint(t.Context(), alive, id); err != nil {
			t.Errorf("RemoveCheckpoint(%s) = %v, want nil", id, err)
		}
	}
	if got := output(t, c, "cat ~/checkpoint"); got != "first" {
		t.Errorf("file after RemoveCheckpoint = %q, want first", got)
	}
	if got := output(t, c2, "cat ~/checkpoint; echo forked >~/checkpoint; sync"); got != "first" {
		t.Errorf("file of the fork = %q, want first", got)
	}
	unplug := h.dataDisk(t, d, c2)
	if err := d.Delete(t.Context(), forked); err != nil {
		t.Errorf("Delete of the fork = %v, want nil", err)
	}
	unplug()
	if got := output(t, c, "cat ~/checkpoint"); got != "first" {
		t.Errorf("file after Delete of the fork = %q, want first", got)
	}
	if err := k.Restore(t.Context(), "no-such-vm", "first", false); !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("Restore of a missing VM = %v, want %v", err, vm.ErrNotFound)
	}
	return c
}

const forked = "forked"

// forked makes a VM from the disk of the checkpoint "first" and returns a connection to it.
func (h Harness) forked(t *testing.T, d vm.Driver, k vm.Checkpointer, parent vm.Endpoint) *ssh.Client {
	t.Helper()
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(t.Context()), forked); err != nil {
			t.Error(err)
		}
	})
	s := h.Spec(t, forked)
	s.CPUs, s.Image = 1, vm.Image{} // the parent's count
	if err := k.Fork(t.Context(), alive, "no-such-checkpoint", s, false); err == nil {
		t.Error("Fork of a missing checkpoint = nil, want an error")
	}
	for range 2 { // the second call changes nothing
		if err := k.Fork(t.Context(), alive, "first", s, false); err != nil {
			t.Fatalf("Fork = %v, want nil", err)
		}
	}
	if disks, ok := d.(vm.DataDisks); ok {
		for range 2 { // the second calls change nothing
			if err := disks.CreateDataDisk(t.Context(), dataDisk, dataDiskSize); err != nil {
				t.Fatalf("CreateDataDisk = %v, want nil", err)
			}
			if err := disks.SetDataDisk(t.Context(), forked, dataDisk); err != nil {
				t.Fatalf("SetDataDisk = %v, want nil", err)
			}
		}
		if err := disks.SetDataDisk(t.Context(), alive, dataDisk); err == nil {
			t.Error("SetDataDisk of a VM that runs = nil, want an error")
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), h.Boot)
	defer cancel()
	ep, err := d.Start(ctx, forked, func(msg string) { t.Log(msg) })
	if err != nil {
		t.Fatalf("Start of the fork = %v, want nil", err)
	}
	if ep.Addr == parent.Addr {
		t.Errorf("address of the fork = %s, the same as that of its parent", ep.Addr)
	}
	return h.dial(t, ep)
}

const (
	dataDisk     = "vmtest"
	dataDiskSize = 64 << 20
)

// dataDisk checks the disk that the forked VM has, and returns a function that checks it once that VM
// is gone, and deletes it.
func (h Harness) dataDisk(t *testing.T, d vm.Driver, c *ssh.Client) (unplug func()) {
	t.Helper()
	disks, ok := d.(vm.DataDisks)
	if !ok {
		return func() {}
	}
	if h.Real {
		if got, want := output(t, c, "lsblk --bytes --noheadings --nodeps --output SIZE | grep -cx ' *"+strconv.Itoa(dataDiskSize)+"'"), "1"; got != want {
			t.Errorf("disks of %d bytes in the guest = %s, want %s", dataDiskSize, got, want)
		}
	}
	if is, err := disks.InspectDataDisk(t.Context(), dataDisk); err != nil || is.VM != forked || is.Size != dataDiskSize {
		t.Errorf("InspectDataDisk = %+v, %v, want %d bytes in use by %s", is, err, dataDiskSize, forked)
	}
	for what, err := range map[string]error{
		"GrowDataDisk":   disks.GrowDataDisk(t.Context(), dataDisk, 2*dataDiskSize),
		"DeleteDataDisk": disks.DeleteDataDisk(t.Context(), dataDisk),
	} {
		if err == nil {
			t.Errorf("%s of a disk in use = nil, want an error", what)
		}
	}
	return func() {
		t.Helper()
		for range 2 { // the second call changes nothing
			if err := disks.GrowDataDisk(t.Context(), dataDisk, 2*dataDiskSize); err != nil {
				t.Errorf("GrowDataDisk = %v, want nil", err)
			}
		}
		if err := disks.GrowDataDisk(t.Context(), dataDisk, dataDiskSize); err == nil {
			t.Error("GrowDataDisk to a smaller size = nil, want an error")
		}
		if is, err := disks.InspectDataDisk(t.Context(), dataDisk); err != nil || is.VM != "" || is.Size != 2*dataDiskSize {
			t.Errorf("InspectDataDisk = %+v, %v, want %d bytes in use by no VM", is, err, 2*dataDiskSize)
		}
		for range 2 {
			if err := disks.DeleteDataDisk(t.Context(), dataDisk); err != nil {
				t.Errorf("DeleteDataDisk = %v, want nil", err)
			}
		}
		if _, err := disks.InspectDataDisk(t.Context(), dataDisk); !errors.Is(err, vm.ErrNotFound) {
			t.Errorf("InspectDataDisk of a deleted disk = %v, want %v", err, vm.ErrNotFound)
		}
	}
}
