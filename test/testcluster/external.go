package testcluster

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
)

// External is a NATS server that does not belong to the program, with an account for a cluster.
type External struct {
	cluster.External

	t      *testing.T
	config string
	server *server.Server
}

// NewExternal starts a NATS server that accepts leaf nodes with TLS and the seed of an nkey.
func NewExternal(t *testing.T) *External {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	web := httptest.NewTLSServer(nil) // for its certificate, of 127.0.0.1
	defer web.Close()
	pair := web.TLS.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	cert := write("cert.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}))
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	seed, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	public, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	leaf := FreeAddr(t)
	x := &External{External: cluster.External{URL: "tls://" + leaf, Domain: "hub", Credentials: write("seed", seed), CA: cert}, t: t}
	x.config = write("nats.conf", fmt.Appendf(nil, `listen: %q
jetstream { store_dir: %q, max_file: 100G, domain: hub }
leafnodes { listen: %q, tls { cert_file: %q, key_file: %q } }
accounts { TEAM { jetstream: enabled, users: [ { nkey: %s } ] } }
`, FreeAddr(t), filepath.Join(dir, "streams"), leaf, cert, write("key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})), public))
	x.Start()
	t.Cleanup(x.Stop)
	return x
}

// Start starts the server.
func (x *External) Start() {
	x.t.Helper()
	opts, err := server.ProcessConfigFile(x.config)
	if err != nil {
		x.t.Fatal(err)
	}
	opts.NoSigs = true
	if x.server, err = server.NewServer(opts); err != nil {
		x.t.Fatal(err)
	}
	go x.server.Start()
	if !x.server.ReadyForConnections(time.Minute) {
		x.t.Fatal("the NATS server does not listen after a minute")
	}
}

// Stop ends the server.
func (x *External) Stop() {
	x.server.Shutdown()
	x.server.WaitForShutdown()
}
