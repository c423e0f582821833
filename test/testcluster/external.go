package testcluster

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
)

// External is a cluster of NATS servers that does not belong to the program, with an account for a cluster.
type External struct {
	cluster.External

	t       *testing.T
	configs []string
	servers []*server.Server
}

// NewExternal starts NATS servers that accept leaf nodes with TLS: with the seed of an nkey, or with credentials
// that an operator of NATS has signed.
func NewExternal(t *testing.T, servers int, signed bool) *External {
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
	credentials, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	public, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	accounts := fmt.Sprintf("accounts { TEAM { jetstream: enabled, users: [ { nkey: %s } ] } }", public)
	if signed {
		accounts, credentials = signedAccounts(t, public, credentials)
	}
	x := &External{External: cluster.External{Domain: "hub", Credentials: write("credentials", credentials), CA: cert}, t: t}
	keyFile := write("key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))
	var routes []string
	for range servers {
		routes = append(routes, FreeAddr(t))
	}
	for i, route := range routes {
		leaf := FreeAddr(t)
		if i == 0 {
			x.URL = "tls://" + leaf
		}
		text := fmt.Sprintf(`server_name: n%d
listen: %q
jetstream { store_dir: %q, max_file: 100G, domain: hub }
leafnodes { listen: %q, tls { cert_file: %q, key_file: %q } }
%s
`, i, FreeAddr(t), filepath.Join(dir, strconv.Itoa(i)), leaf, cert, keyFile, accounts)
		if servers > 1 {
			text += fmt.Sprintf("cluster { name: hub, listen: %q, routes: [nats://%s] }\n", route, strings.Join(routes, ", nats://"))
		}
		x.configs = append(x.configs, write(fmt.Sprintf("n%d.conf", i), []byte(text)))
	}
	x.Start()
	t.Cleanup(x.Stop)
	return x
}

// signedAccounts returns the settings of a server with an operator and an account, and credentials for a user of it.
func signedAccounts(t *testing.T, user string, seed []byte) (settings string, credentials []byte) {
	t.Helper()
	must := func(text string, err error) string {
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	key := func(create func() (nkeys.KeyPair, error)) (nkeys.KeyPair, string) {
		k, err := create()
		if err != nil {
			t.Fatal(err)
		}
		return k, must(k.PublicKey())
	}
	operator, operatorID := key(nkeys.CreateOperator)
	_, systemID := key(nkeys.CreateAccount)
	team, teamID := key(nkeys.CreateAccount)
	system := jwt.NewAccountClaims(systemID)
	account := jwt.NewAccountClaims(teamID)
	account.Limits.JetStreamLimits = jwt.JetStreamLimits{DiskStorage: jwt.NoLimit, Streams: jwt.NoLimit, Consumer: jwt.NoLimit}
	text, err := jwt.FormatUserConfig(must(jwt.NewUserClaims(user).Encode(team)), seed)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("operator: %s\nsystem_account: %s\nresolver: MEMORY\nresolver_preload: { %s: %s, %s: %s }", must(jwt.NewOperatorClaims(operatorID).Encode(operator)),
		systemID, systemID, must(system.Encode(operator)), teamID, must(account.Encode(operator))), text
}

// Start starts the servers.
func (x *External) Start() {
	x.t.Helper()
	x.servers = nil
	for _, config := range x.configs {
		opts, err := server.ProcessConfigFile(config)
		if err != nil {
			x.t.Fatal(err)
		}
		opts.NoSigs = true
		s, err := server.NewServer(opts)
		if err != nil {
			x.t.Fatal(err)
		}
		go s.Start()
		x.servers = append(x.servers, s)
	}
	for _, s := range x.servers {
		if !s.ReadyForConnections(time.Minute) {
			x.t.Fatal("a NATS server does not listen after a minute")
		}
	}
}

// Stop ends the servers.
func (x *External) Stop() {
	for _, s := range x.servers {
		s.Shutdown()
		s.WaitForShutdown()
	}
}
