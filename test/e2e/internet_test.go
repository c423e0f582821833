//go:build e2e

package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/miekg/dns"
)

// Addresses of the pretend internet and LAN; all are this namespace's own.
const (
	resolverAddr = "203.0.113.53"
	allowedAddr  = "203.0.113.10" // github.com
	foreignAddr  = "203.0.113.66" // evil.example
	lanAddr      = "10.9.9.9"
	metadataAddr = "169.254.169.254"
)

// zone is what the pretend internet's resolver knows.
var zone = map[string][]string{
	"github.com.":        {allowedAddr},
	"evil.example.":      {foreignAddr},
	"files.example.":     {"203.0.113.20"},
	"rebind.github.com.": {lanAddr, "127.0.0.1", metadataAddr},
	"rebind.example.":    {lanAddr, "203.0.113.20"},
	"pkg.npmjs.org.":     {"203.0.113.30"},
	"alias.example.":     nil, // a CNAME to evil.example
}

// hits counts what reached the pretend internet, by "ADDRESS:PORT" and "dns NAME".
var hits sync.Map

func hit(what string) {
	n, _ := hits.LoadOrStore(what, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
}

func hitCount(what string) int64 {
	n, ok := hits.Load(what)
	if !ok {
		return 0
	}
	return n.(*atomic.Int64).Load()
}

// pretendInternet furnishes the namespace this process was started in.
func pretendInternet() error {
	var script []string
	for _, args := range []string{
		"addr add 203.0.113.1/32 dev lo",
		"addr add " + resolverAddr + "/32 dev lo", "addr add " + allowedAddr + "/32 dev lo",
		"addr add " + foreignAddr + "/32 dev lo", "addr add 203.0.113.20/32 dev lo", "addr add 203.0.113.30/32 dev lo",
		"addr add " + lanAddr + "/32 dev lo", "addr add " + metadataAddr + "/32 dev lo",
	} {
		script = append(script, "ip "+args)
	}
	if out, err := exec.Command("sh", "-ec", strings.Join(script, "\n")).CombinedOutput(); err != nil {
		return fmt.Errorf("furnish the namespace: %w: %s", err, out)
	}
	// The guest's network takes its resolver from the host's resolv.conf.
	if err := syscall.Mount("none", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	f, err := os.CreateTemp("", "asz-resolv")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // the mount keeps the inode
	fmt.Fprintln(f, "nameserver "+resolverAddr)
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	f.Close()
	if err := syscall.Mount(f.Name(), "/etc/resolv.conf", "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("replace resolv.conf: %w", err)
	}
	for _, network := range []string{"udp", "tcp"} {
		s := &dns.Server{Addr: resolverAddr + ":53", Net: network, Handler: dns.HandlerFunc(resolve)}
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		failed := make(chan error, 1)
		go func() { failed <- s.ListenAndServe() }()
		select {
		case <-started:
		case err := <-failed:
			return fmt.Errorf("resolver: %w", err)
		}
	}
	for _, addr := range []string{
		allowedAddr + ":80", allowedAddr + ":22", allowedAddr + ":25", allowedAddr + ":8080", allowedAddr + ":853",
		foreignAddr + ":80", "203.0.113.20:80", lanAddr + ":80", metadataAddr + ":80", "127.0.0.1:80",
	} {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		go http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:gosec // a test server
			hit(addr)
			_, _ = io.WriteString(w, "this is "+addr+"\n")
		}))
	}
	return nil
}

func resolve(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	name := strings.ToLower(q.Question[0].Name)
	hit("dns " + name)
	addrs, ok := zone[name]
	switch {
	case !ok:
		m.Rcode = dns.RcodeNameError
	case name == "alias.example.":
		m.Answer = append(m.Answer, &dns.CNAME{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: 60}, Target: "evil.example."})
		addrs = []string{foreignAddr}
	}
	if q.Question[0].Qtype == dns.TypeA {
		for _, a := range addrs {
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(a)})
		}
	}
	_ = w.WriteMsg(m)
}
