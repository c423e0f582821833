//go:build e2e

package e2e

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/md5"
	crand "crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/cgi"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/net/websocket"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
)

// patience is how long the forge waits for a client's data. If something between them
// holds data back, so that the client waits for the forge in turn, the client's
// connection ends.
const patience = 2 * time.Minute

// forge is a server of the pretend internet for the requests of real clients: git
// over HTTPS and SSH, HTTP/1.1 and HTTP/2, with and without TLS, WebSocket, event
// streams, uploads and long downloads. On port 7000 it answers with the digest of
// everything that a client sends before it closes its side.
type forge struct {
	t     *testing.T
	root  string // of the bare repositories
	token string // required for a push over HTTPS
	ca    []byte // PEM
	http  *http.ServeMux

	hostKey ssh.Signer
	login   atomic.Pointer[[]byte] // the public key that may log in over SSH

	acks sync.Map    // channels, by event stream
	sent chan string // digests of the long downloads
}

const (
	repository = "team/project.git"
	bigSize    = 96 << 20
	events     = 6
)

func newForge(t *testing.T, root, token string, names ...string) *forge {
	t.Helper()
	return newForgeOf(t, newAuthority(t), root, token, names...)
}

// newForgeOf starts a forge whose certificates a signs.
func newForgeOf(t *testing.T, a authority, root, token string, names ...string) *forge {
	t.Helper()
	f := &forge{t: t, root: root, token: token, ca: a.pem, http: http.NewServeMux(), sent: make(chan string, 1)}
	f.http.HandleFunc("/hello", f.hello)
	f.http.HandleFunc("/upload", upload)
	f.http.HandleFunc("/big", f.big)
	f.http.HandleFunc("/events", f.events)
	f.http.HandleFunc("/ack", f.ack)
	f.http.Handle("/socket", websocket.Server{Handler: echo})
	f.http.HandleFunc("/team/", f.git)
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	if f.hostKey, err = ssh.NewSignerFromKey(key); err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{a.certify(t, names)}}
	for _, addr := range []string{forgeAddr, sixAddr} {
		f.serve(net.JoinHostPort(addr, "80"), &http.Server{})
		f.serve(net.JoinHostPort(addr, "443"), &http.Server{TLSConfig: config.Clone()})
	}
	go each(f.listen(forgeAddr+":22"), f.ssh)
	go each(f.listen(forgeAddr+":7000"), digest)
	return f
}

// listen opens a port in the pretend internet until the end of the test.
func (f *forge) listen(addr string) (l net.Listener) {
	f.t.Helper()
	if err := far.Do(func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	}); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { l.Close() })
	return l
}

func (f *forge) serve(addr string, s *http.Server) {
	s.Handler, s.ErrorLog = f.http, log.New(io.Discard, "", 0)
	l := f.listen(addr)
	f.t.Cleanup(func() { s.Close() })
	if s.TLSConfig != nil {
		go s.ServeTLS(l, "", "")
		return
	}
	go s.Serve(l)
}

func each(l net.Listener, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			serve(c)
		}()
	}
}

// authority is a CA.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte // the certificate
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	a := authority{key: newECKey(t), cert: &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Pretend CA"},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.sign(t, a.cert, a.key)})
	return a
}

// keptAuthority returns the CA in the file path, and makes it if there is none that is
// valid for another day.
func keptAuthority(t *testing.T, path string) authority {
	t.Helper()
	if kept, err := tls.LoadX509KeyPair(path, path); err == nil && time.Until(kept.Leaf.NotAfter) > 24*time.Hour {
		if key, ok := kept.PrivateKey.(*ecdsa.PrivateKey); ok {
			return authority{kept.Leaf, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: kept.Leaf.Raw})}
		}
	}
	a := newAuthority(t)
	der, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		t.Fatal(err)
	}
	text := slices.Concat(a.pem, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	if err := atomicfile.Write(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return a
}

func newECKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// sign makes a certificate for key, valid for a month.
func (a authority) sign(t *testing.T, c *x509.Certificate, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().AddDate(0, 1, 0)
	der, err := x509.CreateCertificate(crand.Reader, c, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// certify makes a certificate for a server with these names.
func (a authority) certify(t *testing.T, names []string) tls.Certificate {
	t.Helper()
	key := newECKey(t)
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: names[0]}, DNSNames: names,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	return tls.Certificate{Certificate: [][]byte{a.sign(t, leaf, key)}, PrivateKey: key}
}

// hello reports how it was reached.
func (f *forge) hello(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "%s at %v over %s from %s\n", r.Host, r.Context().Value(http.LocalAddrContextKey), r.Proto, r.RemoteAddr)
}

func upload(w http.ResponseWriter, r *http.Request) {
	h := sha256.New()
	n, err := io.Copy(h, r.Body)
	fmt.Fprintf(w, "%s %d %v %v %x\n", r.Proto, n, r.TransferEncoding, err, h.Sum(nil))
}

// big sends bigSize bytes without repetition. Its digest detects errors, not attacks,
// and costs an emulated guest a third of a better one.
func (f *forge) big(w http.ResponseWriter, _ *http.Request) {
	h := md5.New()
	w.Header().Set("Content-Length", strconv.Itoa(bigSize))
	var seed [32]byte
	_, _ = crand.Read(seed[:])
	n, err := io.Copy(w, io.TeeReader(io.LimitReader(rand.NewChaCha8(seed), bigSize), h))
	if err != nil {
		f.sent <- fmt.Sprintf("%d bytes, then %v", n, err)
		return
	}
	f.sent <- hex.EncodeToString(h.Sum(nil))
}

// events sends one event after another, each after the client has acknowledged the
// previous one.
func (f *forge) events(w http.ResponseWriter, r *http.Request) {
	acks := make(chan string)
	f.acks.Store(r.FormValue("stream"), acks)
	w.Header().Set("Content-Type", "text/event-stream")
	for i := range events {
		fmt.Fprintf(w, "data: %d\n\n", i)
		w.(http.Flusher).Flush()
		select {
		case got := <-acks:
			if got != strconv.Itoa(i) {
				return
			}
		case <-time.After(patience):
			return
		case <-r.Context().Done():
			return
		}
	}
	_, _ = io.WriteString(w, "data: end\n\n")
}

func (f *forge) ack(w http.ResponseWriter, r *http.Request) {
	acks, ok := f.acks.Load(r.FormValue("stream"))
	if !ok {
		http.NotFound(w, r)
		return
	}
	select {
	case acks.(chan string) <- r.FormValue("event"):
	case <-time.After(patience):
	}
}

// echo greets, and then repeats what it receives.
func echo(c *websocket.Conn) {
	if err := websocket.Message.Send(c, "welcome"); err != nil {
		return
	}
	for {
		var text string
		if err := websocket.Message.Receive(c, &text); err != nil {
			return
		}
		if err := websocket.Message.Send(c, text); err != nil {
			return
		}
	}
}

// digest answers when the client has sent everything.
func digest(c net.Conn) {
	h := sha256.New()
	n, err := io.Copy(h, c)
	fmt.Fprintf(c, "%d %v %x\n", n, err, h.Sum(nil))
}

// git implements git's smart protocol over HTTPS. Any client may read, a push needs
// the token.
func (f *forge) git(w http.ResponseWriter, r *http.Request) {
	if r.TLS == nil {
		http.Error(w, "not without TLS", http.StatusForbidden)
		return
	}
	user, token, _ := r.BasicAuth()
	if strings.Contains(r.URL.String(), "git-receive-pack") && (user != "x-access-token" || token != f.token) {
		w.Header().Set("WWW-Authenticate", `Basic realm="forge"`)
		http.Error(w, "who are you?", http.StatusUnauthorized)
		return
	}
	git, err := exec.LookPath("git")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	(&cgi.Handler{
		Path: git, Args: []string{"http-backend"}, Logger: log.New(io.Discard, "", 0),
		Env: []string{"GIT_PROJECT_ROOT=" + f.root, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_GLOBAL=/dev/null"},
	}).ServeHTTP(w, r)
}

// ssh serves one SSH connection, for git only.
func (f *forge) ssh(c net.Conn) {
	config := &ssh.ServerConfig{PublicKeyCallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
		if want := f.login.Load(); want == nil || !bytes.Equal(*want, key.Marshal()) {
			return nil, fmt.Errorf("unknown key")
		}
		return nil, nil
	}}
	config.AddHostKey(f.hostKey)
	conn, channels, requests, err := ssh.NewServerConn(c, config)
	if err != nil {
		return
	}
	defer conn.Close()
	go ssh.DiscardRequests(requests)
	for n := range channels {
		if n.ChannelType() != "session" {
			_ = n.Reject(ssh.UnknownChannelType, "sessions only")
			continue
		}
		ch, requests, err := n.Accept()
		if err != nil {
			return
		}
		go f.gitOver(ch, requests)
	}
}

var gitCommand = regexp.MustCompile(`^git-(upload-pack|receive-pack) '/?([a-z]+/[a-z]+\.git)'$`)

func (f *forge) gitOver(ch ssh.Channel, requests <-chan *ssh.Request) {
	defer ch.Close()
	for r := range requests {
		var line struct{ Command string }
		if r.Type != "exec" || ssh.Unmarshal(r.Payload, &line) != nil {
			_ = r.Reply(r.Type == "env", nil)
			continue
		}
		m := gitCommand.FindStringSubmatch(line.Command)
		_ = r.Reply(m != nil, nil)
		if m == nil {
			return
		}
		cmd := exec.Command("git", m[1], filepath.Join(f.root, m[2]))
		cmd.Stdout, cmd.Stderr = ch, ch.Stderr()
		stdin, err := cmd.StdinPipe()
		if err != nil {
			return
		}
		go func() { // ends with the channel
			_, _ = io.Copy(stdin, ch)
			stdin.Close()
		}()
		status := struct{ Code uint32 }{}
		if err := cmd.Run(); err != nil {
			status.Code = 1
		}
		_, _ = ch.SendRequest("exit-status", false, ssh.Marshal(status))
		return
	}
}
