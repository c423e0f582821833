package lima

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// These are ioctl numbers and offsets of linux/kvm.h for x86_64; the kernel keeps
// them stable.
const (
	kvmGetAPIVersion       = 0xAE00
	kvmCreateVM            = 0xAE01
	kvmGetVCPUMmapSize     = 0xAE04
	kvmCreateVCPU          = 0xAE41
	kvmRun                 = 0xAE80
	kvmSetUserMemoryRegion = 0x4020AE46
	kvmSetRegs             = 0x4090AE82
	kvmGetSregs            = 0x8138AE83
	kvmSetSregs            = 0x4138AE84
	kvmGetSupportedCPUID   = 0xC008AE05
	kvmSetCPUID2           = 0x4008AE90
	kvmGetMSRs             = 0xC008AE88
	kvmSetMSRs             = 0x4008AE89

	kvmExitIO  = 2
	kvmExitHLT = 5

	msrArchCapabilities = 0x10a

	probeTimeout = 2 * time.Second
	// loopLimit is generous for a million iterations: a processor takes 1 ms for
	// them, a KVM that interprets them takes seconds.
	loopLimit = 150 * time.Millisecond
)

// probeKVM runs a few instructions under KVM and returns what is wrong with it, or
// "". KVM on nested and para-virtual hosts may open, create VMs and run "hlt", and
// still not run an ordinary guest.
func probeKVM() string {
	answer := make(chan string, 1)
	// KVM_RUN cannot be interrupted from Go. If it hangs, this goroutine and its
	// thread are abandoned; the process is a short-lived command.
	go func() {
		runtime.LockOSThread() // a vCPU belongs to its thread
		defer runtime.UnlockOSThread()
		if err := runTinyGuest(); err != nil {
			answer <- err.Error()
			return
		}
		answer <- ""
	}()
	select {
	case a := <-answer:
		return a
	case <-time.After(probeTimeout):
		return fmt.Sprintf("a trivial guest did not finish within %v", probeTimeout)
	}
}

func ioctl(fd int, req uintptr, arg unsafe.Pointer) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
	if errno != 0 {
		return 0, errno
	}
	return int(r), nil
}

// guestCode counts down from a million, writes 42 to port 0x80 and halts.
var guestCode = []byte{
	0xb9, 0x40, 0x42, 0x0f, 0x00, // mov ecx,1000000
	0xff, 0xc9, // dec ecx
	0x75, 0xfc, // jnz -4
	0xb0, 0x28, // mov al,40
	0x04, 0x02, // add al,2
	0xe6, 0x80, // out 0x80,al
	0xf4, // hlt
}

const (
	guestMemory = 1 << 20
	codeAt      = 0x1000
	pageTables  = 0x2000
)

func runTinyGuest() (err error) {
	kvm, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/kvm: %w", err)
	}
	defer unix.Close(kvm)
	if v, err := ioctl(kvm, kvmGetAPIVersion, nil); err != nil {
		return fmt.Errorf("KVM_GET_API_VERSION: %w", err)
	} else if v != 12 {
		return fmt.Errorf("KVM has API version %d", v)
	}
	machine, err := ioctl(kvm, kvmCreateVM, nil)
	if err != nil {
		return fmt.Errorf("KVM_CREATE_VM: %w", err)
	}
	defer unix.Close(machine)

	mem, err := unix.Mmap(-1, 0, guestMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("guest memory: %w", err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	copy(mem[codeAt:], guestCode)
	region := struct {
		slot, flags         uint32
		guest, size, memory uint64
	}{size: guestMemory, memory: uint64(uintptr(unsafe.Pointer(&mem[0])))}
	if _, err := ioctl(machine, kvmSetUserMemoryRegion, unsafe.Pointer(&region)); err != nil {
		return fmt.Errorf("KVM_SET_USER_MEMORY_REGION: %w", err)
	}

	cpu, err := ioctl(machine, kvmCreateVCPU, nil)
	if err != nil {
		return fmt.Errorf("KVM_CREATE_VCPU: %w", err)
	}
	defer unix.Close(cpu)
	size, err := ioctl(kvm, kvmGetVCPUMmapSize, nil)
	if err != nil {
		return fmt.Errorf("KVM_GET_VCPU_MMAP_SIZE: %w", err)
	}
	run, err := unix.Mmap(cpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the vCPU: %w", err)
	}
	defer func() { _ = unix.Munmap(run) }()

	if err := setUpCPU(kvm, cpu, mem); err != nil {
		return err
	}
	begin := time.Now()
	if err := runToHalt(cpu, run); err != nil {
		return err
	}
	if took := time.Since(begin); took > loopLimit {
		return fmt.Errorf("a million iterations took %v: the guest is emulated", took.Round(time.Millisecond))
	}
	return nil
}

// setUpCPU puts the vCPU into 64-bit mode at codeAt.
func setUpCPU(kvm, cpu int, mem []byte) error {
	cpuid := make([]byte, 8+40*256) // KVM checks 64-bit mode against it
	binary.LittleEndian.PutUint32(cpuid, 256)
	if _, err := ioctl(kvm, kvmGetSupportedCPUID, unsafe.Pointer(&cpuid[0])); err != nil {
		return fmt.Errorf("KVM_GET_SUPPORTED_CPUID: %w", err)
	}
	if _, err := ioctl(cpu, kvmSetCPUID2, unsafe.Pointer(&cpuid[0])); err != nil {
		return fmt.Errorf("KVM_SET_CPUID2: %w", err)
	}
	// QEMU's -cpu host copies this register and aborts when setting it fails.
	msr := struct {
		n, _     uint32
		index, _ uint32
		data     uint64
	}{n: 1, index: msrArchCapabilities}
	if n, err := ioctl(kvm, kvmGetMSRs, unsafe.Pointer(&msr)); err == nil && n == 1 {
		if n, err := ioctl(cpu, kvmSetMSRs, unsafe.Pointer(&msr)); err != nil || n != 1 {
			return fmt.Errorf("KVM lists MSR %#x but refuses to set it (nested or para-virtual host)", msr.index)
		}
	}

	// Identity map of the first 2 MiB with one large page.
	le := binary.LittleEndian
	le.PutUint64(mem[pageTables:], pageTables+0x1000|3)
	le.PutUint64(mem[pageTables+0x1000:], pageTables+0x2000|3)
	le.PutUint64(mem[pageTables+0x2000:], 0x83)

	var sregs [0x138]byte // struct kvm_sregs
	if _, err := ioctl(cpu, kvmGetSregs, unsafe.Pointer(&sregs[0])); err != nil {
		return fmt.Errorf("KVM_GET_SREGS: %w", err)
	}
	for i := range 6 { // cs, ds, es, fs, gs, ss; struct kvm_segment is 24 bytes
		seg := sregs[24*i : 24*i+24]
		le.PutUint64(seg[0:], 0)
		le.PutUint32(seg[8:], 0xffffffff)
		selector, typ, db, long := uint16(16), byte(3), byte(1), byte(0)
		if i == 0 {
			selector, typ, db, long = 8, 11, 0, 1
		}
		le.PutUint16(seg[12:], selector)
		copy(seg[14:], []byte{typ, 1, 0, db, 1, long, 1, 0, 0})
	}
	const control = 8*24 + 2*16                  // after tr, ldt, gdt, idt
	le.PutUint64(sregs[control:], 0x80050033)    // cr0: paging, protection
	le.PutUint64(sregs[control+16:], pageTables) // cr3
	le.PutUint64(sregs[control+24:], 0x20)       // cr4: PAE
	le.PutUint64(sregs[control+40:], 0x500)      // efer: long mode
	if _, err := ioctl(cpu, kvmSetSregs, unsafe.Pointer(&sregs[0])); err != nil {
		return fmt.Errorf("KVM_SET_SREGS: %w", err)
	}
	var regs [18]uint64 // struct kvm_regs
	regs[6] = 0x8000    // rsp
	regs[16] = codeAt   // rip
	regs[17] = 2        // rflags
	if _, err := ioctl(cpu, kvmSetRegs, unsafe.Pointer(&regs[0])); err != nil {
		return fmt.Errorf("KVM_SET_REGS: %w", err)
	}
	return nil
}

// runToHalt runs the vCPU and checks the computed result.
func runToHalt(cpu int, run []byte) error {
	le := binary.LittleEndian
	computed := false
	for range 16 {
		if _, err := ioctl(cpu, kvmRun, nil); errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		} else if err != nil {
			return fmt.Errorf("KVM_RUN: %w", err)
		}
		switch reason := le.Uint32(run[8:]); reason {
		case kvmExitIO:
			offset := le.Uint64(run[40:])
			computed = le.Uint16(run[34:]) == 0x80 && offset < uint64(len(run)) && run[offset] == 42
		case kvmExitHLT:
			if !computed {
				return errors.New("the guest computed a wrong result")
			}
			return nil
		default:
			return fmt.Errorf("the guest exited for reason %d", reason)
		}
	}
	return errors.New("the guest does not exit")
}
