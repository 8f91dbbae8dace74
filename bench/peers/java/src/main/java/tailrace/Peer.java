package tailrace;

import com.couchbase.client.core.deps.io.netty.buffer.ByteBuf;
import com.couchbase.client.dcp.Client;
import com.couchbase.client.dcp.StreamFrom;
import com.couchbase.client.dcp.StreamTo;
import com.couchbase.client.dcp.config.CompressionMode;
import com.couchbase.client.dcp.highlevel.DatabaseChangeListener;
import com.couchbase.client.dcp.highlevel.Deletion;
import com.couchbase.client.dcp.highlevel.FlowControlMode;
import com.couchbase.client.dcp.highlevel.Mutation;
import com.couchbase.client.dcp.highlevel.StreamFailure;
import com.couchbase.client.dcp.message.DcpMutationMessage;
import com.couchbase.client.dcp.message.MessageUtil;
import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Locale;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicReference;
import java.util.zip.CRC32;

/**
 * Reads a bucket with java-dcp-client whenever it is asked to, and reports how long that took.
 *
 * <p>Arguments: low|high HOST:PORT BUCKET USER PASSWORD CA-FILE|- snappy|plain. A line on stdin asks for a
 * reading, {@code read DOCUMENTS} or {@code check DOCUMENTS}; a line of JSON on stdout is the answer.
 */
public final class Peer {
  private static final int WINDOW = 16 << 20; // what the Kafka connector asks for

  private static final Duration PATIENCE = Duration.ofMinutes(2); // for a machine that is busy

  private final String[] args;
  private final long wanted;
  private final boolean check;
  private final CountDownLatch done = new CountDownLatch(1);
  private final AtomicReference<Throwable> failure = new AtomicReference<>();
  private final CRC32 crc = new CRC32();
  private final long began = System.nanoTime();
  private long firstAt;
  private long documents;
  private long valueBytes;
  private long seqnos;
  private long cas;
  private long contents;

  private Peer(String[] args, long wanted, boolean check) {
    this.args = args;
    this.wanted = wanted;
    this.check = check;
  }

  public static void main(String[] args) throws Exception {
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      String[] words = line.split(" ");
      System.out.println(new Peer(args, Long.parseLong(words[1]), words[0].equals("check")).run());
      System.out.flush();
    }
    System.exit(0);
  }

  private String run() throws Exception {
    OperatingSystemMXBean system = ManagementFactory.getPlatformMXBean(OperatingSystemMXBean.class);
    long cpuBefore = system.getProcessCpuTime();
    double seconds;
    try (Client client = build()) {
      if (args[0].equals("low")) {
        listenLow(client);
      } else {
        listenHigh(client);
      }
      client.connect().block();
      client.initializeState(StreamFrom.BEGINNING, StreamTo.INFINITY).block();
      client.startStreaming().block();
      done.await();
      seconds = (System.nanoTime() - began) / 1e9;
    }
    if (failure.get() != null) {
      throw new IllegalStateException(failure.get());
    }
    double cpu = (system.getProcessCpuTime() - cpuBefore) / 1e9;
    return String.format(
        Locale.ROOT,
        "{\"documents\": %d, \"value_bytes\": %d, \"seqnos\": %s, \"cas\": %s, \"contents\": %s,"
            + " \"seconds\": %.6f, \"first_s\": %.6f, \"cpu_s\": %.6f, \"peak_kib\": %d}",
        documents, valueBytes, Long.toUnsignedString(seqnos), Long.toUnsignedString(cas),
        Long.toUnsignedString(contents), seconds, (firstAt - began) / 1e9, cpu, peakKib());
  }

  private Client build() {
    Client.Builder builder = Client.builder()
        .seedNodes(args[1])
        .bucket(args[2])
        .credentials(args[3], args[4])
        .collectionsAware(true)
        .compression(args[6].equals("snappy") ? CompressionMode.ENABLED : CompressionMode.DISABLED)
        .socketConnectTimeout(PATIENCE.toMillis())
        .bootstrapTimeout(PATIENCE)
        .flowControl(WINDOW);
    if (!args[5].equals("-")) {
      builder.securityConfig(security -> security.enableTls(true).trustCertificate(Path.of(args[5])));
    }
    return builder.build();
  }

  private void listenLow(Client client) {
    client.controlEventHandler((flow, event) -> {
      flow.ack(event);
      event.release();
    });
    client.dataEventHandler((flow, event) -> {
      try {
        if (DcpMutationMessage.is(event)) {
          ByteBuf value = DcpMutationMessage.content(event);
          int size = value.readableBytes();
          if (check) {
            ByteBuf key = MessageUtil.getKey(event);
            int prefix = 1; // the default collection's number
            took(DcpMutationMessage.bySeqno(event), DcpMutationMessage.cas(event), size,
                key.nioBuffer(key.readerIndex() + prefix, key.readableBytes() - prefix), value.nioBuffer());
          } else {
            took(DcpMutationMessage.bySeqno(event), DcpMutationMessage.cas(event), size, null, null);
          }
        }
      } finally {
        flow.ack(event);
        event.release();
      }
    });
  }

  private void listenHigh(Client client) {
    client.listener(new DatabaseChangeListener() {
      @Override
      public void onMutation(Mutation mutation) {
        byte[] value = mutation.getContent();
        ByteBuffer key = null;
        if (check) {
          key = ByteBuffer.wrap(mutation.getKey().getBytes(StandardCharsets.UTF_8));
        }
        took(mutation.getOffset().getSeqno(), mutation.getCas(), value.length, key, ByteBuffer.wrap(value));
      }

      @Override
      public void onDeletion(Deletion deletion) {
        // none are there
      }

      @Override
      public void onFailure(StreamFailure cause) {
        failure.set(cause.getCause());
        done.countDown();
      }
    }, FlowControlMode.AUTOMATIC);
  }

  /** One thread calls this: the bucket is on one node, and a connection has one event loop. */
  private void took(long seqno, long casOfIt, int size, ByteBuffer key, ByteBuffer value) {
    if (documents == 0) {
      firstAt = System.nanoTime();
    }
    valueBytes += size;
    seqnos += seqno;
    cas ^= casOfIt;
    if (check) {
      crc.reset();
      crc.update(key);
      crc.update(value);
      contents += crc.getValue();
    }
    documents++;
    if (documents == wanted) {
      done.countDown();
    }
  }

  private static long peakKib() throws Exception {
    for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
      if (line.startsWith("VmHWM:")) {
        return Long.parseLong(line.replaceAll("[^0-9]", ""));
      }
    }
    return 0;
  }
}
