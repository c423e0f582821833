package cluster

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// External is a NATS cluster that others run. It holds the streams. A core is a leaf node of it
// (https://docs.nats.io/running-a-nats-service/configuration/leafnodes): hosts log in to the core, which
// decides what they may do, as without it.
type External struct {
	URL         string `json:"url"`                   // tls://HOST:PORT at which it accepts leaf nodes
	Domain      string `json:"domain,omitempty"`      // of its JetStream
	Credentials string `json:"credentials,omitempty"` // file with its credentials or the seed of an nkey; "" for none
	CA          string `json:"ca,omitempty"`          // file with the certificates that it is trusted by, as PEM; "" for the system's
}

// Check returns an error unless the settings can be used.
func (x External) Check() error {
	_, err := x.remote()
	return err
}

// remote returns the settings in the server's form.
func (x External) remote() (*server.RemoteLeafOpts, error) {
	u, err := url.Parse(x.URL)
	if err != nil || u.Hostname() == "" || u.Port() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
		return nil, fail.New(fail.Usage, "cluster.url must be tls://HOST:PORT").WithHint("agent-sessionizer config edit config.yaml")
	}
	if u.User != nil { // the URL is in the settings and in logs
		return nil, fail.New(fail.Usage, "cluster.url must not have a password; cluster.credentials names a file").WithHint("agent-sessionizer config edit config.yaml")
	}
	if x.Domain == "" || strings.ContainsAny(x.Domain, " .*>") {
		return nil, fail.New(fail.Usage, "cluster.domain must name the JetStream domain of the NATS cluster, a word without dots").WithHint("agent-sessionizer config edit config.yaml")
	}
	r := &server.RemoteLeafOpts{URLs: []*url.URL{{Scheme: "nats-leaf", Host: u.Host}}, TLS: u.Scheme == "tls"}
	switch ip := net.ParseIP(u.Hostname()); {
	case r.TLS:
		r.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: u.Hostname()}
	case u.Scheme != "nats" || ip == nil || !ip.IsLoopback():
		return nil, fail.New(fail.Usage, "cluster.url must begin with tls://, or nats:// for an address of this host such as 127.0.0.1").WithHint("agent-sessionizer config edit config.yaml")
	}
	if x.CA != "" {
		text, err := os.ReadFile(x.CA)
		if err != nil {
			return nil, fail.New(fail.Usage, "read cluster.ca: %w", err).WithHint("agent-sessionizer config edit config.yaml")
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(text) || !r.TLS {
			return nil, fail.New(fail.Usage, "cluster.ca must name certificates in PEM, for a URL with tls://").WithHint("agent-sessionizer config edit config.yaml")
		}
		r.TLSConfig.RootCAs = roots
	}
	if x.Credentials == "" {
		return r, nil
	}
	text, err := os.ReadFile(x.Credentials)
	if err != nil {
		return nil, fail.New(fail.Usage, "read cluster.credentials: %w", err).WithHint("agent-sessionizer config edit config.yaml")
	}
	if key, err := nkeys.FromSeed([]byte(strings.TrimSpace(string(text)))); err == nil {
		key.Wipe()
		r.Nkey = strings.TrimSpace(string(text))
		return r, nil
	}
	if _, err := nkeys.ParseDecoratedUserNKey(text); err != nil {
		return nil, fail.New(fail.Usage, "cluster.credentials must name a file of NATS credentials, or with the seed of an nkey").WithHint("agent-sessionizer config edit config.yaml")
	}
	r.Credentials, err = filepath.Abs(x.Credentials) // the server reads it again at each login
	return r, err
}

// ownRequests precedes the subjects of requests for the JetStream of the server itself.
const ownRequests = "$JS.API."

// requests returns what precedes the subjects of requests for the JetStream of x, from
// https://docs.nats.io/running-a-nats-service/configuration/leafnodes/jetstream_leafnodes.
func (x External) requests() string { return "$JS." + x.Domain + ".API." }

// ofOthers in place of a number of copies means that an external NATS cluster holds the stream.
const ofOthers = 0

// placed completes the settings of a new stream with that number of copies, or ofOthers.
func placed(c jetstream.StreamConfig, replicas int) jetstream.StreamConfig {
	if replicas == ofOthers {
		c.Replicas, c.MaxConsumers = 1, maxConsumers // grow makes more copies
		return c
	}
	c.Replicas, c.Placement = replicas, &jetstream.Placement{Tags: []string{coreTag}}
	return c
}
