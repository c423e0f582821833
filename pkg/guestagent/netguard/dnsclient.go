package netguard

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

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// Bounds of one lookup of a program, and of the cache of results.
const (
	maxDNSClients = 4096 // names; the cache is cleared when it is full
	maxLooks      = 8    // one in progress, the others wait for it
	maxProcesses  = 8192
	maxFiles      = 4096 // open files inspected per process
	maxSockets    = 1 << 16
)

// dnsClients records which program first asked for a denied name. A lookup reads much
// of /proc, so lookups run one at a time, and a name with a known program needs
// none. The results are not evidence: programs choose their own names.
type dnsClients struct {
	queue chan struct{} // has capacity for maxLooks
	look  sync.Mutex

	mu    sync.Mutex
	first map[string]string // requested name → program
}

func newDNSClients() *dnsClients {
	return &dnsClients{queue: make(chan struct{}, maxLooks), first: map[string]string{}}
}

// programOf returns the first program that asked for a name, where the current request
// comes from the address from. It returns "" when it cannot find the program: the
// program has ended, it runs in a container with its own network, or too many
// lookups are waiting.
func (a *dnsClients) programOf(from netip.AddrPort, name string) string {
	if program, ok := a.cachedProgram(name); ok {
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
	if program, ok := a.cachedProgram(name); ok { // found by the lookup that this one waited for
		return program
	}
	program := programAt(from)
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.first) >= maxDNSClients {
		clear(a.first)
	}
	a.first[name] = program
	return program
}

func (a *dnsClients) cachedProgram(name string) (string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	program, ok := a.first[name]
	return program, ok
}

// programAt returns the program whose socket is bound to an address.
func programAt(from netip.AddrPort) string {
	for _, table := range []string{"udp", "udp6", "tcp", "tcp6"} {
		if inode := inodeAt("/proc/net/"+table, from); inode != "" {
			return programOf("socket:[" + inode + "]")
		}
	}
	return ""
}

// inodeAt finds the socket of an address in one of the kernel's tables. A socket
// bound to the unspecified address matches too, unless a more specific one exists.
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

// kernelAddr parses an address as the kernel prints it: 32-bit words, each in the
// machine's byte order, which is little-endian on every supported guest.
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

// programOf returns the first process that holds a socket open.
func programOf(socket string) string {
	for _, pid := range sys.Names("/proc", maxProcesses) {
		if _, err := strconv.Atoi(pid); err != nil {
			continue
		}
		files := filepath.Join("/proc", pid, "fd")
		for _, fd := range sys.Names(files, maxFiles) {
			if target, err := os.Readlink(filepath.Join(files, fd)); err == nil && target == socket {
				return guestproto.Clean(strings.TrimSpace(sys.Text(filepath.Join("/proc", pid, "comm"))))
			}
		}
	}
	return ""
}
