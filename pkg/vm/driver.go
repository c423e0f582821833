// Package vm defines what the product needs of a virtual machine manager: to create,
// start, stop, delete and inspect VMs by name.
//
// It knows nothing of sessions, repositories or policies. Two drivers implement it,
// vm/lima (real VMs) and vm/fake (for speed and fault injection); both pass the suite
// in test/vmtest.
package vm

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// ErrNotFound is returned, wrapped, when no VM of that name exists.
var ErrNotFound = errors.New("no such VM")

// ReadyMarker starts the line that a guest prints on its first serial console once
// sshd accepts logins: the marker, a space, and the host's public key in
// authorized_keys form ("ssh-ed25519 AAAA…"). Only this VM can write to its serial
// console, so the key needs no trust on first use.
const ReadyMarker = guestproto.ReadyMarker

// State is the state of a VM as seen from the host.
type State string

// The states of a VM.
const (
	Stopped State = "stopped" // exists, does not run
	Running State = "running" // its process runs; says nothing about the guest's health
	Broken  State = "broken"  // parts are missing or contradict each other; Delete works
)

// Image is a bootable disk image. Kernel, Initrd and Cmdline are set when the VM
// manager loads the kernel rather than firmware.
type Image struct {
	Arch     string `json:"arch"`             // "x86_64" or "aarch64"
	Location string `json:"location"`         // path or https URL of a qcow2 or raw disk
	Digest   string `json:"digest,omitempty"` // "sha256:…"; required for URLs
	Kernel   string `json:"kernel,omitempty"`
	Initrd   string `json:"initrd,omitempty"`
	Cmdline  string `json:"cmdline,omitempty"`

	// State is a file that Saver.Save made together with the disk at Location. A VM's
	// first start resumes it instead of booting.
	State string `json:"state,omitempty"`
}

// Spec describes the VM to create.
type Spec struct {
	Name          string
	CPUs          int
	Memory        int64 // bytes
	Disk          int64 // bytes
	Image         Image
	User          string // login user in the guest, uid 1000, passwordless sudo
	AuthorizedKey string // the only key that may log in, also by certificates that it signs; authorized_keys form
	Boot          string // shell script, run as root early in every boot, before the network is up; no secrets
	Template      []byte // VM template that the fields above override; nil means the driver's own
	ExternalNet   bool   // the VM's only network card ends in Driver.NetSockets, not in a network of the VM manager
}

// NetSockets holds the sockets where the far end of the only network card of a VM with
// ExternalNet is expected. A process must serve them before Start, and for as long as the
// VM runs: a card whose far end went away cannot be reconnected.
type NetSockets struct {
	Subnet netip.Prefix `json:"subnet"` // the host's side is address +2, the guest's +15
	MAC    string       `json:"mac"`    // of the guest's card
	MTU    int          `json:"mtu"`    // the largest packet that the card's transport carries
	// Paths of UNIX sockets. A VM uses one of the first two.
	Stream   string `json:"stream"`   // Ethernet frames, each preceded by its length in 4 bytes, big-endian (QEMU's -netdev socket)
	Datagram string `json:"datagram"` // a client hands over one end of a SOCK_DGRAM pair as SCM_RIGHTS (vz)
	API      string `json:"api"`      // HTTP, with the requests that Lima sends to its user-v2 daemon (gvisor-tap-vsock's /services)
}

// Machine describes a VM and its state.
type Machine struct {
	Name     string
	State    State
	Reason   string   // why it is Broken, "" otherwise
	Endpoint Endpoint // set once it is Running and was ready
	Arch     string
	CPUs     int
	Memory   int64  // bytes
	Disk     int64  // bytes, as the guest sees it
	DiskUsed int64  // bytes on the host
	Dir      string // the driver's directory for this VM
	Root     string // prefix of every path in the guest; "" for a real VM
	Resumes  bool   // its next start continues in memory that was kept
}

// Endpoint is where and how the guest's sshd is reached.
type Endpoint struct {
	Addr    string `json:"addr"` // "127.0.0.1:PORT"
	User    string `json:"user"`
	HostKey string `json:"host_key"` // authorized_keys form, learned over the serial console at this start
}

// Accel says how guest code runs.
type Accel struct {
	Name   string        // "kvm", "tcg", "vz", "hvf", "none"
	Reason string        // why nothing faster is used, "" when it is the best available
	Hint   string        // the command that may help in that case
	Took   time.Duration // duration of the probe; 0 when answered from the cache
}

// Progress receives what a long call is doing, one short line at a time. It may be
// nil.
type Progress func(msg string)

// Driver manages VMs. All methods may be called concurrently from several goroutines
// and processes for different VMs; for one VM the caller serialises. Every method is
// idempotent and may be repeated after the process died inside it.
type Driver interface {
	// Create makes the VM's files without starting it. An existing VM with the same
	// name stays unchanged; one that a dead process left half made is made again.
	Create(ctx context.Context, s Spec) error

	// Start boots the VM and returns once the guest printed ReadyMarker. On a VM that
	// runs already it returns the endpoint of that run. A cancelled ctx stops the
	// waiting, never the VM. If the guest panics or powers off, Start fails
	// immediately. It clears stale pid files and disk locks of dead processes.
	Start(ctx context.Context, name string, p Progress) (Endpoint, error)

	// Stop ends a running VM. It calls poweroff, which should do so over SSH; nil
	// means to cut the power. If poweroff fails, Stop presses the power button where
	// one exists. It waits up to grace, then kills the VM. A stopped VM is a success.
	Stop(ctx context.Context, name string, poweroff func(context.Context) error, grace time.Duration) error

	// Delete kills what runs and removes every trace. A VM that does not exist is a
	// success.
	Delete(ctx context.Context, name string) error

	// Export writes the disk of a stopped VM to the file dest as an image that
	// depends on no other file. It flushes dest to the disk.
	Export(ctx context.Context, name, dest string, p Progress) error

	// Inspect reads files and sockets with a limit of one second; it returns
	// ErrNotFound, or a Broken machine with the reason.
	Inspect(ctx context.Context, name string) (Machine, error)

	// List inspects every VM; one bad VM never fails the list.
	List(ctx context.Context) ([]Machine, error)

	// NetSockets returns where the network card of the VM of that name ends if the VM has
	// ExternalNet. It depends only on the name, and creates nothing.
	NetSockets(name string) (NetSockets, error)

	// Accel says how VMs of an architecture would run on this host. It probes, and caches the
	// verdict.
	Accel(ctx context.Context, arch string) (Accel, error)

	// Check returns what the host lacks to run VMs of an architecture, each with a hint; nil
	// when it lacks nothing.
	Check(ctx context.Context, arch string) []error
}

// Saver is a Driver whose running VMs can be saved and forked. A fork is a VM made
// from an Image with a State: it continues where the saved one was, until its guest
// has got an identity of its own.
type Saver interface {
	// StateKey identifies everything on this host except the image that a snapshot
	// depends on: a snapshot can be resumed where the key is the same. An error says
	// why VMs cannot be saved here.
	StateKey(ctx context.Context, arch string, cpus int, memory int64) (string, error)

	// Save boots a VM whose Spec.Boot makes the guest print guestproto.AsleepMarker, and
	// waits for the marker. It moves the VM's memory, devices and disk into the
	// directory dir, as the files StateFile and DiskFile, and flushes them to the
	// disk. Then the VM is gone. Save may be repeated.
	Save(ctx context.Context, name, dir string, p Progress) error
}

// DataDisks is a Driver that keeps disks which belong to no VM. A VM can have one of them besides its
// own. All methods may be repeated after the process died inside them; for one disk the caller
// serialises.
type DataDisks interface {
	// CreateDataDisk creates an empty disk. A disk of that name stays as it is.
	CreateDataDisk(ctx context.Context, name string, size int64) error

	// GrowDataDisk makes a disk larger that no running VM has. A disk of that size stays as it is; a
	// smaller size is an error.
	GrowDataDisk(ctx context.Context, name string, size int64) error

	// DeleteDataDisk deletes a disk. A missing one is a success. It is an error while a running VM has
	// the disk.
	DeleteDataDisk(ctx context.Context, name string) error

	// InspectDataDisk returns ErrNotFound, wrapped, if no disk has that name.
	InspectDataDisk(ctx context.Context, name string) (DataDisk, error)

	// SetDataDisk gives a stopped VM the disk from its next start on, in the place of another one. An
	// empty disk takes the VM's away. The start fails while another running VM has the disk.
	SetDataDisk(ctx context.Context, name, disk string) error
}

// DataDisk describes a disk that belongs to no VM.
type DataDisk struct {
	Size int64  // bytes, as a guest sees it
	Used int64  // bytes on the host
	Path string // directory or file on the host
	VM   string // the running VM that has it, "" if none has
}

// Checkpointer is a Driver that keeps states of its VMs. A checkpoint has an id that the caller
// chose, matching [0-9a-z-]+, and belongs to one VM. All methods may be repeated after the process
// died inside them.
type Checkpointer interface {
	// Checkpoint keeps the state of a VM: its disk, and the memory of one that runs where the VM
	// manager supports that. A VM that runs goes on; it pauses only for the last part. A checkpoint
	// that exists already stays as it is. If a process died inside Checkpoint or Suspend, the VM may
	// be paused until Settle is called.
	Checkpoint(ctx context.Context, name, id string, p Progress) (Checkpoint, error)

	// Suspend makes a checkpoint of a running VM and ends the VM, which does nothing after that
	// moment. Its next Start resumes it there. If the VM has ended, Suspend needs the checkpoint of
	// an earlier call. It returns ErrNoMemory, wrapped, where the VM manager keeps no memory. After
	// an error, the VM runs as before.
	Suspend(ctx context.Context, name, id string, p Progress) (Checkpoint, error)

	// Settle completes or undoes what a process that died inside Checkpoint or Suspend left of a
	// running VM, and lets the VM go on. Call it before anything else is done with the VM.
	Settle(ctx context.Context, name string) error

	// Restore gives a stopped VM the state of one of its checkpoints, in the place of its own,
	// which is lost. Its next Start resumes the memory if memory is set, and boots from the disk
	// otherwise. It returns ErrNotWoken, wrapped, for memory that this host cannot resume. Without
	// an id, the VM gets the disk of the checkpoint that it was about to resume.
	Restore(ctx context.Context, name, id string, memory bool) error

	// Fork creates the VM s.Name from a checkpoint of the VM name, which may be running. It takes
	// image and size from that VM, and ignores those in s. The fork is independent: the parent may be
	// deleted afterwards. If memory is set, the first Start resumes the memory and gives the guest a
	// new identity; for that, "agent-guest fork wait" must have been running at the checkpoint.
	// Otherwise the first Start boots from the disk. Fork returns ErrNotWoken, wrapped, for memory
	// that this host cannot resume. If s.Name exists already, Fork leaves it unchanged. The fork has
	// a checkpoint with the same id, which the caller should remove once the fork has started.
	Fork(ctx context.Context, name, id string, s Spec, memory bool) error

	// RemoveCheckpoint removes a checkpoint. A missing one is a success. The VM keeps running or
	// stays startable.
	RemoveCheckpoint(ctx context.Context, name, id string) error
}

// Checkpoint describes a kept state of a VM.
type Checkpoint struct {
	Memory bool          `json:"memory,omitempty"` // whether it has the memory, or the disk alone
	Size   int64         `json:"size"`             // bytes on the host
	Pause  time.Duration `json:"pause,omitempty"`  // how long the VM did not run
}

// These are the files of a saved VM.
const (
	StateFile = "state"
	DiskFile  = "disk"
)

// ErrPanicked is returned, wrapped, by Start when the guest's kernel panicked before the guest
// was ready. The caller should start the VM once more: emulators before QEMU 8.1 sometimes run
// kernel code that another processor is patching, see gitlab.com/qemu-project/qemu, commit
// deba78709a ("accel/tcg: Always lock pages before translation"). Whatever serves the VM's
// network may have ended with it, so the driver cannot do this.
var ErrPanicked = errors.New("the guest's kernel panicked")

// ErrNoMemory is returned, wrapped, by Suspend if the VM manager cannot keep the memory of VMs.
var ErrNoMemory = errors.New("the memory of this VM cannot be kept")

// ErrNotWoken is returned, wrapped, by the first Start of a fork or of a restored VM when its
// memory could not be resumed. The caller should delete the fork and create it without the state,
// or restore the VM without its memory.
var ErrNotWoken = errors.New("the saved VM could not be resumed")
