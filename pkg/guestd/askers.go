package guestd

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

// Bounds of one look for a program, and of what is remembered.
const (
	maxAskers    = 4096 // names; then it starts anew
	maxLooks     = 8    // one under way, the others wait for it
	maxProcesses = 8192
	maxFiles     = 4096 // open files looked at, of one process
	maxSockets   = 1 << 16
)

// askers knows which program asked first for a denied name. A look reads much of
// /proc, so they go one by one, and a name whose program is known needs none.
// What is found is hearsay: programs choose their names.
type askers struct {
	queue chan struct{} // has room for maxLooks
	look  sync.Mutex

	mu    sync.Mutex
	first map[string]string // name that was asked for → program
}

func newAskers() *askers {
	return &askers{queue: make(chan struct{}, maxLooks), first: map[string]string{}}
}

// who names the first program that asked for a name, now from an address of its
// own, or "" when it cannot be found: it has ended, it is in a container with
// a network of its own, or too many looks are waited for.
func (a *askers) who(from netip.AddrPort, name string) string {
	if program, ok := a.known(name); ok {
		return program
	}
	select {
	case a.queue <- struct{}{}:
		defer func() { <-a.queue }()
	default:
		return ""
	}
	a.look.Lock()
	defer a.look.Unlock()
	if program, ok := a.known(name); ok { // by the look that was waited for
		return program
	}
	program := programAt(from)
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.first) >= maxAskers {
		clear(a.first)
	}
	a.first[name] = program
	return program
}

func (a *askers) known(name string) (string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	program, ok := a.first[name]
	return program, ok
}

// programAt names the program whose socket has an address.
func programAt(from netip.AddrPort) string {
	for _, table := range []string{"udp", "udp6", "tcp", "tcp6"} {
		if inode := inodeAt("/proc/net/"+table, from); inode != "" {
			return programOf("socket:[" + inode + "]")
		}
	}
	return ""
}

// inodeAt finds the socket of an address in one of the kernel's tables. One that
// is bound to no address in particular has it too.
func inodeAt(table string, from netip.AddrPort) string {
	f, err := os.Open(table)
	if err != nil {
		return ""
	}
	defer f.Close()
	port := fmt.Sprintf("%04X", from.Port())
	anywhere := ""
	lines := bufio.NewScanner(f)
	for range maxSockets {
		if !lines.Scan() {
			break
		}
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[9] == "0" {
			continue
		}
		local, localPort, _ := strings.Cut(fields[1], ":")
		if localPort != port {
			continue
		}
		addr := kernelAddr(local)
		if addr.Unmap() == from.Addr() {
			return fields[9]
		}
		if addr.IsUnspecified() {
			anywhere = fields[9]
		}
	}
	return anywhere
}

// kernelAddr reads an address as the kernel prints it: words of 32 bits, each
// a number of the machine's own order, which is little-endian wherever guests run.
func kernelAddr(text string) netip.Addr {
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw)%4 != 0 {
		return netip.Addr{}
	}
	for word := range slices.Chunk(raw, 4) {
		slices.Reverse(word)
	}
	addr, _ := netip.AddrFromSlice(raw)
	return addr
}

// programOf names the first process that holds a socket open.
func programOf(socket string) string {
	for _, pid := range listing("/proc", maxProcesses) {
		if _, err := strconv.Atoi(pid); err != nil {
			continue
		}
		files := filepath.Join("/proc", pid, "fd")
		for _, fd := range listing(files, maxFiles) {
			if target, err := os.Readlink(filepath.Join(files, fd)); err == nil && target == socket {
				return wire.Clean(strings.TrimSpace(readBounded(filepath.Join("/proc", pid, "comm"))))
			}
		}
	}
	return ""
}

// listing is the first entries of a directory, none when it cannot be read:
// processes end while they are looked at.
func listing(dir string, limit int) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	// Readdirnames returns what it has besides its error.
	list, _ := d.Readdirnames(limit)
	return list
}
