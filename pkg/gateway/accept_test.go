package gateway

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/balajiv113/fd"
)

// attachDatagram connects the guest in the same way as Lima's vz driver.
func (w *world) attachDatagram() net.Conn {
	w.t.Helper()
	path := w.t.TempDir() + "/d"
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		w.t.Fatal(err)
	}
	go w.g.ServeDatagram(l) // ends with the gateway
	near := w.passSocket(path)
	w.attached()
	return near
}

func (w *world) passSocket(path string) net.Conn {
	w.t.Helper()
	ends, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_DGRAM, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	near, far := os.NewFile(uintptr(ends[0]), "near"), os.NewFile(uintptr(ends[1]), "far")
	defer near.Close()
	defer far.Close()
	via, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		w.t.Fatal(err)
	}
	defer via.Close()
	if err := fd.Put(via, far); err != nil {
		w.t.Fatal(err)
	}
	c, err := net.FileConn(near)
	if err != nil {
		w.t.Fatal(err)
	}
	if u, ok := c.(*net.UnixConn); ok {
		u.SetWriteBuffer(1 << 20)
		u.SetReadBuffer(1 << 20)
	}
	return c
}

func TestBothCables(t *testing.T) {
	for name, c := range map[string]config{
		"stream":             {},
		"stream large MTU":   {mtu: 65520},
		"datagram":           {datagram: true},
		"datagram large MTU": {datagram: true, mtu: 65520},
	} {
		t.Run(name, func(t *testing.T) {
			c.policy = allow("example.org:7777")
			w := newWorld(t, c)
			w.server("example.org", 7777, echo)
			conn := w.dial("example.org", 7777)
			sent := make([]byte, 3<<20)
			for i := range sent {
				sent[i] = byte(i * 7)
			}
			go func() {
				conn.Write(sent)
				conn.(interface{ CloseWrite() error }).CloseWrite()
			}()
			got, err := io.ReadAll(conn)
			if err != nil || string(got) != string(sent) {
				t.Fatalf("%d bytes came back, equal to those sent: %t, error %v, want %d equal bytes", len(got), string(got) == string(sent), err, len(sent))
			}
		})
	}
}

func TestOneConnectionInALife(t *testing.T) {
	w := newWorld(t, config{})
	path := t.TempDir() + "/s"
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- w.g.ServeStream(l) }()
	refused := func() {
		t.Helper()
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		if n, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Fatalf("Read from a refused connection = %d, %v, want %v", n, err, io.EOF)
		}
	}
	refused()
	w.wait("a refused link", func(r Record) bool { return r.Kind == KindLink && !r.Allowed })
	if _, err := w.guest.Lookup(w.ctx(), "host.lima.internal"); err != nil {
		t.Fatalf("Lookup by the first VM after the second was refused: %v", err)
	}
	select {
	case <-w.g.Detached():
		t.Fatal("Detached is closed while the VM is connected, want it open")
	default:
	}
	w.guestEnd.Close()
	<-w.g.Detached()
	refused()
	if w.g.Stats().Attached {
		t.Error("Stats().Attached = true after the VM disconnected, want false")
	}
	l.Close()
	if err := <-served; err != nil {
		t.Errorf("ServeStream after its listener was closed: error %v, want nil", err)
	}
}

func TestDatagramRefusals(t *testing.T) {
	w := newWorld(t, config{datagram: true})
	path := t.TempDir() + "/d"
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	go w.g.ServeDatagram(l)
	second := w.passSocket(path)
	defer second.Close()
	w.wait("a refused link", func(r Record) bool { return r.Kind == KindLink && !r.Allowed })
	// Anything other than one socket is refused and leaves nothing behind.
	for _, files := range [][]*os.File{nil, {os.Stdin}, {os.Stdin, os.Stderr}} {
		via, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		before := len(w.all(func(r Record) bool { return r.Kind == KindLink }))
		if len(files) > 0 {
			if err := fd.Put(via, files...); err != nil {
				t.Fatal(err)
			}
		}
		via.Close()
		for deadline := time.Now().Add(patience); len(w.all(func(r Record) bool { return r.Kind == KindLink })) == before; {
			if time.Now().After(deadline) {
				t.Fatalf("no refusal was recorded within %v for a connection that passes %d files", patience, len(files))
			}
			time.Sleep(time.Millisecond)
		}
	}
	if _, err := w.guest.Lookup(w.ctx(), "host.lima.internal"); err != nil {
		t.Fatalf("Lookup by the first VM after the refusals: %v", err)
	}
}

func TestCloseWithoutMachine(t *testing.T) {
	g, err := New(Options{Subnet: testSubnet, MAC: guestMAC, MTU: 1500})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	<-g.Detached()
	l, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	if err := g.ServeStream(l); !errors.Is(err, net.ErrClosed) {
		t.Errorf("ServeStream of a closed gateway: error %v, want %v", err, net.ErrClosed)
	}
}

func TestNewRefuses(t *testing.T) {
	good := Options{Subnet: testSubnet, MAC: guestMAC, MTU: 1500}
	for name, spoil := range map[string]func(*Options){
		"no subnet":     func(o *Options) { o.Subnet = zeroSubnet },
		"IPv6":          func(o *Options) { o.Subnet = prefix("fd00::/64") },
		"tiny":          func(o *Options) { o.Subnet = prefix("192.168.5.0/28") },
		"fake range":    func(o *Options) { o.Subnet = prefix("198.18.4.0/24") },
		"no MAC":        func(o *Options) { o.MAC = "" },
		"multicast MAC": func(o *Options) { o.MAC = "01:00:5e:00:00:01" },
		"our own MAC":   func(o *Options) { o.MAC = net.HardwareAddr(gatewayMAC).String() },
		"small MTU":     func(o *Options) { o.MTU = 576 },
		"large MTU":     func(o *Options) { o.MTU = 65535 },
	} {
		o := good
		spoil(&o)
		if g, err := New(o); err == nil {
			g.Close()
			t.Errorf("%s: New(%+v) succeeded, want an error", name, o)
		}
	}
}

func TestReceiveSocketEndsWithoutASocket(t *testing.T) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: t.TempDir() + "/d", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	silent, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	accepted, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	failed := make(chan error, 1)
	go func() {
		_, err := receiveSocket(accepted, 10*time.Millisecond)
		failed <- err
	}()
	select {
	case err := <-failed:
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("receiveSocket from a silent connection = %v, want %v", err, os.ErrDeadlineExceeded)
		}
	case <-time.After(patience):
		t.Fatalf("receiveSocket did not end within %v", patience)
	}
}
